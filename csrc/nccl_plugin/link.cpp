#include "nccl_plugin/link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>

namespace fanfold::nccl_plugin {
namespace {

constexpr size_t kRingBytes = size_t{1} << 20;

// From one writer to one reader. Positions count bytes and never wrap.
struct Ring {
  alignas(64) std::atomic<uint64_t> written = 0;
  std::atomic<uint32_t> reader_sleeps = 0;
  alignas(64) std::atomic<uint64_t> read = 0;
  std::atomic<uint32_t> writer_sleeps = 0;
  alignas(64) std::byte bytes[kRingBytes];
};

}  // namespace

struct SharedRings {
  uint64_t nonce = 0;  // of the listener whose rank opens it
  Ring ring[2];        // ring[s] is written by side s
};

namespace {

class SharedLink final : public Link {
 public:
  SharedLink(Socket socket, RingMemory memory, int side)
      : Link(std::move(socket)), memory_(std::move(memory)), out_(memory_.rings()->ring[side]),
        in_(memory_.rings()->ring[1 - side]) {}

  State send(const std::byte* data, size_t bytes, size_t& moved) override {
    if (ended_) return State::kEnded;
    const uint64_t at = out_.written.load(std::memory_order_relaxed);
    const size_t room = kRingBytes - (at - out_.read.load(std::memory_order_acquire));
    const size_t count = std::min(bytes, room);
    copy_in(at, data, count);
    out_.written.store(at + count, std::memory_order_seq_cst);
    if (count > 0 && out_.reader_sleeps.exchange(0) != 0) wake();
    moved += count;
    return State::kOpen;
  }

  State receive(std::byte* data, size_t bytes, size_t& moved) override {
    const State state = drain();
    const uint64_t at = in_.read.load(std::memory_order_relaxed);
    const size_t ready = in_.written.load(std::memory_order_acquire) - at;
    const size_t count = std::min(bytes, ready);
    copy_out(at, data, count);
    in_.read.store(at + count, std::memory_order_seq_cst);
    if (count > 0 && in_.writer_sleeps.exchange(0) != 0) wake();
    moved += count;
    // What a peer wrote before it ended still counts.
    return ready == 0 && bytes > 0 ? state : State::kOpen;
  }

  // Sets the flag first and looks then; the other side looks at the flag after its change. So one
  // of the two sees the other.
  short events_to_sleep(bool has_output) override {
    in_.reader_sleeps.store(1);
    bool work = in_.written.load() != in_.read.load();
    if (has_output) {
      out_.writer_sleeps.store(1);
      work = work || out_.written.load() - out_.read.load() < kRingBytes;
    }
    return work ? short{0} : short{POLLIN};
  }

  const char* name() const override { return "shared memory"; }

 private:
  void wake() const {
    const std::byte bell{1};
    size_t sent = 0;
    // A full socket has woken the peer already.
    static_cast<void>(socket().send(&bell, 1, sent));
  }
  // Takes the wake-up bytes off the socket, and notices the peer's end.
  State drain() {
    std::byte bells[64];
    size_t got = 0;
    const State state = socket().receive(bells, sizeof bells, got);
    ended_ = ended_ || state != State::kOpen;
    return ended_ ? State::kEnded : State::kOpen;
  }
  void copy_in(uint64_t at, const std::byte* data, size_t count) {
    const size_t start = at % kRingBytes;
    const size_t first = std::min(count, kRingBytes - start);
    std::memcpy(out_.bytes + start, data, first);
    std::memcpy(out_.bytes, data + first, count - first);
  }
  void copy_out(uint64_t at, std::byte* data, size_t count) {
    const size_t start = at % kRingBytes;
    const size_t first = std::min(count, kRingBytes - start);
    std::memcpy(data, in_.bytes + start, first);
    std::memcpy(data + first, in_.bytes, count - first);
  }

  RingMemory memory_;
  Ring& out_;
  Ring& in_;
  bool ended_ = false;
};

}  // namespace

short Link::events_to_sleep(bool has_output) {
  return static_cast<short>(POLLIN | (has_output ? POLLOUT : 0));
}

RingMemory::~RingMemory() {
  if (rings_ != nullptr) munmap(rings_, sizeof(SharedRings));
}

RingMemory::RingMemory(RingMemory&& other) noexcept
    : file_(std::move(other.file_)), rings_(std::exchange(other.rings_, nullptr)) {}

RingMemory& RingMemory::operator=(RingMemory&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(rings_, other.rings_);
  return *this;
}

Problem RingMemory::map() {
  void* memory =
      mmap(nullptr, sizeof(SharedRings), PROT_READ | PROT_WRITE, MAP_SHARED, file_.descriptor(), 0);
  if (memory == MAP_FAILED) return system_problem("mapping shared memory", errno);
  rings_ = static_cast<SharedRings*>(memory);
  return {};
}

Problem RingMemory::create(uint64_t nonce) {
  file_ = Socket(memfd_create("fanfold-nccl", MFD_CLOEXEC));
  if (!file_.is_open()) return system_problem("memfd_create", errno);
  if (ftruncate(file_.descriptor(), sizeof(SharedRings)) != 0) {
    return system_problem("sizing shared memory", errno);
  }
  Problem problem = map();
  if (problem.empty()) (new (rings_) SharedRings)->nonce = nonce;
  return problem;
}

Problem RingMemory::open(int64_t pid, int descriptor, uint64_t nonce) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  file_ = Socket(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file_.is_open()) {
    return system_problem("opening " + path, errno) +
           "; a rank of this host shares its memory so; set wire=tcp in FANFOLD_NCCL_PLUGIN, or "
           "run all ranks as one user";
  }
  struct stat file{};
  const bool fits =
      fstat(file_.descriptor(), &file) == 0 && std::cmp_equal(file.st_size, sizeof(SharedRings));
  Problem problem = fits ? map() : Problem();
  if (!problem.empty() || (fits && rings_->nonce == nonce)) return problem;
  return path +
         " is not what its rank shares: processes of different containers may have the same "
         "numbers; set wire=tcp in FANFOLD_NCCL_PLUGIN";
}

std::unique_ptr<Link> shared_link(Socket socket, RingMemory memory, int side) {
  return std::make_unique<SharedLink>(std::move(socket), std::move(memory), side);
}

}  // namespace fanfold::nccl_plugin
