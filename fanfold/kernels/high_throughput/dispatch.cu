// High-throughput dispatch by a known plan: every row crosses the link once to each peer that wants
// it; receivers copy what comes (token-major in place only what is beside it), and the rows of
// their own rank, to its places. The first `senders` CTAs, one at least, send before they receive;
// all of the grid must be on the GPU at once, as receivers wait for what others send.
#include "high_throughput/dispatch_receive.cuh"
#include "high_throughput/dispatch_send.cuh"
#include "high_throughput/dispatch_send_many.cuh"
#include "high_throughput/relay.cuh"

namespace fanfold::high_throughput {

template <bool kFew>
struct SenderFor {
  using Type = Sender;
};
template <>
struct SenderFor<false> {
  using Type = ManyRanksSender;
};

__global__ void __launch_bounds__(kThreads, 1)
    dispatch(const __grid_constant__ HighThroughputDispatchArgs args) {
  auto& shared = dynamic_shared<DispatchShared>();
  wait_for_previous_kernel();
  const Call call(args.call, HighThroughputPhase::kDispatch);
  const int index = static_cast<int>(blockIdx.x) * kWarps + call.warp;
  const int warps = static_cast<int>(gridDim.x) * kWarps;
  if (blockIdx.x == 0) copy_for_caller(args);
  if (is_aborted(args.source_prefix)) return mark_absent(args, 0, 0, index, warps);
  const auto thread = static_cast<int>(threadIdx.x);
  for_ranks_of(thread, kThreads, [&](int rank) {
    shared.prefix[rank] = rank == 0 ? 0 : args.source_prefix[rank - 1];
  });
  for (int e = thread; e < kLocalExperts + 2; e += kThreads)
    shared.offsets[e] = static_cast<int32_t>(args.offsets[e]);
  __syncthreads();
  RowRing ring(shared.rings[call.warp], call);
  const DispatchWarp warp{args, shared, call, ring.shared, shared.descriptors[call.warp]};
  const bool sends = static_cast<int>(blockIdx.x) < args.call.senders;
  // Receivers have nothing to do until the first rows come. A failed plan may say anything.
  const bool pads = __any_sync(kFullWarp, call.failed()) == 0;
  if (pads && (!sends || args.call.senders == static_cast<int>(gridDim.x))) {
    const int first = sends ? 0 : args.call.senders * kWarps;
    Placer(warp).pad(ring.shared.slots[0], index - first, warps - first);
    const int row = args.source_prefix[kRanks - 1];
    const int place = kExpertMajor != 0 ? shared.offsets[kLocalExperts] : row;
    mark_absent(args, row, place, index - first, warps - first);
  }
  gather(call, shared.participants);
  fence_global_and_bulk();  // what others have left behind comes before what is written there
  const bool moves = !shared.participants.is_aborted;
  const bool relays = kAcrossHosts != 0 && index == warps - 1;
  if (!moves) {
    mark_absent(args, 0, 0, index, warps);
  } else if (relays) {
    const int sent = warp.batches(args.call.rank).count();
    Relay<1>(call).run([&](int source) { return warp.batches(source).count(); },
                       [sent](int) { return sent; });
  } else {
    if (kRanks > 1 && sends) {
      SenderFor<kHasFewRanks>::Type sender(warp);
      ring.run<Until::kWritten>(sender);
    }
    Receiver receiver(warp);
    ring.run<Until::kRead>(receiver);
  }
  bulk_await_written<0>();
  // Nobody shall take what lies where rows have not come for indices.
  if (finish(call, kNewRouting == 0 || moves ? nullptr : args.source_prefix))
    mark_absent(args, 0, 0, 0, 1);
}

}  // namespace fanfold::high_throughput
