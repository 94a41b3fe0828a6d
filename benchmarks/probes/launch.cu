// What a launch, an early launch, and a barrier of the whole grid cost.
//   launch RESULTS.jsonl
#include <cooperative_groups.h>

#include "harness.cuh"

namespace fanfold::probe {

enum class GridBarrier { kNone, kTicket, kCooperative };

struct Ticket {
  uint32_t arrivals, pad[31];
};

// A round ends when the count reaches the next multiple of the grid; nothing is ever reset.
__device__ void ticket_barrier(Ticket* ticket, uint32_t* error) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t mine = add_release_gpu(&ticket->arrivals, 1);
    const uint32_t goal = mine / gridDim.x * gridDim.x + gridDim.x;
    Deadline deadline(error);
    while (static_cast<int32_t>(load_acquire_gpu(&ticket->arrivals) - goal) < 0 &&
           !deadline.expired())
      continue;
  }
  __syncthreads();
}

template <GridBarrier B>
__global__ void grid_kernel(Ticket* ticket, uint32_t* error, int barriers) {
  allow_next_kernel();
  wait_for_previous_kernel();
  for (int i = 0; i < barriers; ++i) {
    if (B == GridBarrier::kTicket) ticket_barrier(ticket, error);
    if (B == GridBarrier::kCooperative) cooperative_groups::this_grid().sync();
  }
}

__global__ void timer_kernel(uint64_t* steps) {
  uint64_t smallest = ~0ull, last = global_nanoseconds();
  for (int i = 0; i < 100000; ++i) {
    const uint64_t now = global_nanoseconds();
    if (now != last && now - last < smallest) smallest = now - last;
    last = now;
  }
  *steps = smallest;
}

class LaunchProbe {
 public:
  LaunchProbe(Node& node, Report& report) : node_(node), report_(report) {
    node.each([&](int r) { tickets_[r] = device_array<Ticket>(1); });
  }

  void run() {
    for (int threads : {32, 512, 1024})
      for (bool early : {false, true})
        time("empty, " + std::to_string(threads) + " threads" + (early ? ", early launch" : ""),
             [=, this](int r) { start<GridBarrier::kNone>(r, threads, early, 0); });
    for (int barriers : {1, 2})
      time("ticket barrier x" + std::to_string(barriers),
           [=, this](int r) { start<GridBarrier::kTicket>(r, 512, false, barriers); });
    for (int barriers : {1, 2})
      time("cooperative barrier x" + std::to_string(barriers),
           [=, this](int r) { start_cooperative(r, barriers); });
    time("barrier of all GPUs", [this](int r) { node_.enqueue_barrier(r); });
    timer_step();
  }

 private:
  template <GridBarrier B>
  void start(int r, int threads, bool early, int barriers) {
    launch(grid_kernel<B>, kCtas, threads, 0, node_.gpu(r).stream, early, tickets_[r],
           node_.gpu(r).error, barriers);
  }

  void start_cooperative(int r, int barriers) {
    uint32_t* error = node_.gpu(r).error;
    void* arguments[] = {&tickets_[r], &error, &barriers};
    check(cudaLaunchCooperativeKernel(grid_kernel<GridBarrier::kCooperative>, kCtas, 512, arguments,
                                      0, node_.gpu(r).stream),
          "cooperative launch");
  }

  void time(const std::string& variant, const std::function<void(int)>& call) {
    const std::string all = field("probe", "launch") + ", " + field("variant", variant);
    report_.timing(all + ", " + field("mode", "chain"), time_plan(node_, {call, 20, 40, false}));
    report_.timing(all + ", " + field("mode", "single"), time_plan(node_, {call, 1, 60, false}));
    report_.timing(all + ", " + field("mode", "cold"), time_plan(node_, {call, 1, 60, true}));
  }

  void timer_step() {
    check(cudaSetDevice(0), "cudaSetDevice");
    uint64_t* steps = device_array<uint64_t>(1);
    timer_kernel<<<1, 1>>>(steps);
    uint64_t smallest = 0;
    check(cudaMemcpy(&smallest, steps, 8, cudaMemcpyDeviceToHost), "steps");
    report_.line(field("probe", "launch") + ", " + field("variant", "global timer step") + ", " +
                 field("ns", static_cast<double>(smallest)));
  }

  Node& node_;
  Report& report_;
  Ticket* tickets_[kRanks];
};

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  if (argc < 2) return std::fprintf(stderr, "usage: %s RESULTS.jsonl\n", argv[0]), 2;
  Node node;
  Report report(argv[1]);
  LaunchProbe(node, report).run();
}
