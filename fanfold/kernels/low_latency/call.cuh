// What every low-latency kernel does around its rows: which call this is, who is waited for and for
// how long, what is reported, and the receipts that let peers use a half of the memory again.
#pragma once

#include "constants.h"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "layout/low_latency_device.h"

namespace fanfold {

inline constexpr int kLocalExperts = kExperts / kRanks;
inline constexpr int kThreads = kWarps * kWarpLanes;
static_assert(kExperts % kRanks == 0 && kTopK <= kWarpLanes && kRanks <= kMostDeviceRanks);
static_assert(kExperts <= kMostDeviceExperts && kThreads <= 1024);

// A word that is still absent. Every word is judged by itself: nothing is assumed of how the words
// of a row, or of one 16-byte store, become visible.
__device__ __forceinline__ bool arrived(uint4 v) {
  return v.x != kAbsent && v.y != kAbsent && v.z != kAbsent && v.w != kAbsent;
}
__device__ __forceinline__ uint4 absent() { return {kAbsent, kAbsent, kAbsent, kAbsent}; }

// For words that we did not make: two NaNs with every bit set lose their sign.
__device__ __forceinline__ uint32_t never_absent(uint32_t word) {
  return word == kAbsent ? 0x7fffffffu : word;
}

// Where in the memory of `owner` this rank writes. In a bench's mirror two GPUs stand for more:
// each is rank 0, and what it sends to another rank comes to the other GPU as from another.
__device__ __forceinline__ int writer_at(const CallArgs& args, int owner) {
  return kMirror != 0 ? (kRanks - owner) % kRanks : args.rank;
}

// What every thread asks for first, all at once, and looks at as late as it can.
struct Prologue {
  CtaEpochs epochs;
  uint32_t failed;   // of LowLatencyState
  int32_t masked;    // lane r: whether rank r is
  uint64_t receipt;  // lane r: what rank r has received

  __device__ static Prologue load(const CallArgs& args, CallKind kind) {
    Prologue seen{};
    seen.epochs = args.state->epochs[static_cast<int>(kind)][blockIdx.x];
    seen.failed = args.state->failed;
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    if (lane >= kRanks) return seen;
    seen.masked = args.state->masked[lane];
    seen.receipt = load_relaxed_system(receipts(args) + lane);
    return seen;
  }
  __device__ static uint64_t* receipts(const CallArgs& args) {
    return reinterpret_cast<uint64_t*>(args.peers[args.rank] + args.at.receipts);
  }
};

__device__ __forceinline__ uint64_t* progress_word(const CallArgs& args, int rank) {
  return reinterpret_cast<uint64_t*>(args.peers[rank] + args.at.progress);
}
__device__ __forceinline__ Progress progress_of(const CallArgs& args, int rank) {
  return {load_relaxed_system(progress_word(args, rank))};
}

__device__ __forceinline__ void store_report(Report* report, uint32_t call, uint32_t epoch,
                                             int32_t first, int32_t second) {
  const uint4 words{call, epoch, static_cast<uint32_t>(first), static_cast<uint32_t>(second)};
  store_relaxed_system(reinterpret_cast<uint4*>(report), words);
}

// In place of what a peer's receipt says, in waits for anything else.
inline constexpr uint32_t kNoReceipt = ~0u;

// Masks a peer that is late, or fails the call. Apart, so that no wait carries it in its registers.
template <CallKind Kind>
__device__ __noinline__ void end_wait(const CallArgs& args, int peer, uint32_t epoch,
                                      uint32_t received) {
  if (args.mask_late != 0) {
    store_relaxed_gpu(reinterpret_cast<uint32_t*>(&args.state->masked[peer]), 1u);
    store_relaxed_system(&args.reports->late[peer], call_id(Kind, epoch));
    return;
  }
  store_relaxed_gpu(&args.state->failed, call_id(Kind, epoch));
  const bool of_receipt = received != kNoReceipt;
  store_report(&args.reports->kinds[static_cast<int>(ReportKind::kTimeout)],
               (1u + static_cast<uint32_t>(Kind)) | (static_cast<uint32_t>(peer) << 8), epoch,
               of_receipt ? static_cast<int32_t>(received) : 0, of_receipt ? 1 : 0);
}

__device__ __forceinline__ void report_other_call(const CallArgs& args, Progress own, int peer,
                                                  Progress theirs) {
  const auto kind = static_cast<CallKind>(own.kind());
  const CtaEpochs& ours = args.state->epochs[own.kind()][blockIdx.x];
  const uint32_t epoch = own.does(kReceive) ? ours.receive : ours.send;
  // Their count is near this rank's own, which is whole.
  const int which = theirs.kind();
  const uint32_t near = args.state->epochs[which][blockIdx.x].send - kFirstEpoch;
  const int32_t number = static_cast<int32_t>(near) + Progress::shortfall(near, theirs.call());
  store_report(&args.reports->kinds[static_cast<int>(ReportKind::kOtherCall)],
               (1u + static_cast<uint32_t>(kind)) | (static_cast<uint32_t>(peer) << 8), epoch,
               1 + which, number);
  store_relaxed_gpu(&args.state->failed, call_id(kind, epoch));
}

// Whether this kernel can never end, because a live peer is in another call that cannot end either
// (Progress::needs): reports the calls of both and fails this one. Called where a wait has lasted
// long, as it reads from the memory of peers; apart, so that no wait carries it in its registers.
// A kernel that a word says needs another has not ended when that other's word is read, so two
// words that need each other are of one moment. Words are loaded anew for each pair, as the callers
// leave few registers.
__device__ __noinline__ bool find_other_call(const CallArgs& args) {
#pragma unroll 1
  for (int pair = 0; pair < kRanks * kRanks; ++pair) {
    const int peer = pair / kRanks;
    const Progress own = progress_of(args, args.rank);
    const Progress theirs = progress_of(args, peer);
    const auto* masked = reinterpret_cast<const uint32_t*>(&args.state->masked[peer]);
    if (peer == args.rank || !own.needs(theirs) || load_relaxed_gpu(masked) != 0) {
      pair += kRanks - 1 - pair % kRanks;
      continue;
    }
    const Progress other = progress_of(args, pair % kRanks);
    if (pair % kRanks == peer || !theirs.needs(other) || !other.needs(theirs)) continue;
    report_other_call(args, own, peer, theirs);
    return true;
  }
  return false;
}

// One kernel's view of its call. Cheap to make in every thread.
template <CallKind Kind>
class Call {
 public:
  const CallArgs& args;
  const Prologue& seen;
  const uint32_t epoch;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;

  __device__ Call(const CallArgs& a, const Prologue& prologue, uint32_t call)
      : args(a), seen(prologue), epoch(call) {}

  __device__ int half() const { return static_cast<int>(epoch & 1u); }

  __device__ int writer_at(int owner) const { return fanfold::writer_at(args, owner); }

  // ---- places in the memory of `owner` ----------------------------------------------------------

  __device__ int64_t slot(int writer, int token) const {
    return int64_t{half() * kRanks + writer} * args.max_tokens + token;
  }
  __device__ uint64_t* call_word(int owner, int writer) const {
    constexpr int kFirst = static_cast<int>(Kind) * kParities * kRanks;
    return reinterpret_cast<uint64_t*>(args.peers[owner] + args.at.calls) + kFirst +
           half() * kRanks + writer;
  }
  __device__ uint64_t* header(int owner, int writer, int token, int k) const {
    constexpr bool kLateHeaders = Kind == CallKind::kCombine;
    const int64_t offset = kLateHeaders ? args.at.late_headers : args.at.headers;
    return reinterpret_cast<uint64_t*>(args.peers[owner] + offset) + slot(writer, token) * kTopK +
           k;
  }
  __device__ uint4* row(int owner, int writer, int token) const {
    const int64_t offset = Kind == CallKind::kDispatch ? args.at.rows : args.at.results;
    return reinterpret_cast<uint4*>(args.peers[owner] + offset +
                                    slot(writer, token) * args.at.row_stride);
  }

  // ---- peers ------------------------------------------------------------------------------------

  // Bit r: rank r is not masked. All lanes of the warp ask together.
  __device__ uint32_t live_ranks() const {
    return __ballot_sync(kFullWarp, lane < kRanks && seen.masked == 0);
  }
  __device__ bool is_masked(int peer) const {
    return load_relaxed_gpu(reinterpret_cast<const uint32_t*>(&args.state->masked[peer])) != 0;
  }
  // Ends this call's waits, and later calls at their start.
  __device__ void fail() const { store_relaxed_gpu(&args.state->failed, call_id(Kind, epoch)); }
  __device__ bool failed() const { return load_relaxed_gpu(&args.state->failed) != 0; }

  __device__ void report(ReportKind kind, int peer, int32_t first, int32_t second) const {
    store_report(&args.reports->kinds[static_cast<int>(kind)], call_of(peer), epoch, first, second);
  }
  __device__ static uint32_t call_of(int peer) {
    return (1u + static_cast<uint32_t>(Kind)) | (static_cast<uint32_t>(peer) << 8);
  }

  // ---- the course of a call ---------------------------------------------------------------------

  // Returns the live ranks, once each of them has received the last call but one, whose half of the
  // memory this call uses. All lanes of a warp ask together. No fence is needed: what the warp
  // stores next depends on the branch, and is not performed before it.
  template <bool LooksAround = false>
  __device__ uint32_t await_receipts() const;

  // Says to every live peer what this call is.
  __device__ void push_call_word(uint32_t live, bool is_fp8) const {
    if (lane >= kRanks || (live >> lane & 1u) == 0) return;
    const CallWord word{static_cast<uint32_t>(args.tokens), args.refused != 0, is_fp8, args.facts,
                        epoch};
    store_relaxed_system(call_word(lane, writer_at(lane)), word.encode());
  }

  // What `source` says of this call: no tokens if it refused, is late, or means another call. One
  // that itself refused takes whatever comes, to make its memory absent again.
  template <bool LooksAround = true>
  __device__ CallWord await_call(int source) const;

  // Tells the host if `word` is a refusal or means another call.
  __device__ void report_call(int source, const CallWord& word) const {
    if (args.refused != 0 || word.epoch != (epoch & 0xffffu)) return;
    if (word.refused) {
      report(ReportKind::kRefused, source, 0, 0);
    } else if (word.facts != args.facts) {
      report(ReportKind::kDisagreement, source, 0, 0);
      fail();  // what follows would wait for each other in vain
    }
  }
};

// What the wait for a peer takes, added to the caller's statistics by the last CTA alone: reading
// the clock takes long, and there everything waits for it.
class WaitClock {
 public:
  __device__ WaitClock(int64_t* wait_ns, int peer)
      : waited_(wait_ns != nullptr && blockIdx.x == gridDim.x - 1 ? wait_ns + peer : nullptr),
        begin_(waited_ != nullptr ? global_nanoseconds() : 0) {}

  __device__ void stop() const {
    if (waited_ != nullptr) *waited_ += static_cast<int64_t>(global_nanoseconds() - begin_);
  }

 private:
  int64_t* const waited_;
  const uint64_t begin_;
};

// A wait that ends: for a peer that is masked, for a call that has failed, and when its time is
// over, which masks the peer or fails the call.
//
// `LooksAround` in a wait for what every peer sends at the start of a call: a peer in another call
// never sends it. What follows it in the same call arrives, or is late.
template <CallKind Kind, bool LooksAround = false>
class Patience {
 public:
  __device__ explicit Patience(const Call<Kind>& call) : call_(call) {}

  // Asked after every fruitless look; `received` is what the peer's receipt says, in a wait for it.
  __device__ bool exhausted(int peer, uint32_t received = kNoReceipt) {
    if ((++looks_ & (kLooks - 1)) != 0) return false;
    if (call_.failed() || call_.is_masked(peer)) return true;
    if constexpr (LooksAround) {
      if ((looks_ & (kLongLooks - 1)) == 0 && looks_around() && find_other_call(call_.args)) {
        return true;
      }
    }
    const auto now = static_cast<int64_t>(global_nanoseconds());
    if (begin_ == 0) begin_ = now;
    if (now - begin_ < call_.args.timeout_ns) return false;
    end_wait<Kind>(call_.args, peer, call_.epoch, received);
    begin_ = 0;  // if that masks the peer, the others have all their time
    return true;
  }

 private:
  static constexpr uint32_t kLooks = 1u << 8;
  static constexpr uint32_t kLongLooks = 1u << 12;  // take milliseconds

  // A few warps find for all whether the kernel can end: some that wait as long as it does. The CTA
  // that sends counts (in combine, the first) waits for all receipts, the last one for all calls.
  __device__ bool looks_around() const {
    const int sender = Kind == CallKind::kDispatch ? call_.args.senders : 0;
    const int cta = static_cast<int>(blockIdx.x);
    return (cta == sender || cta == static_cast<int>(gridDim.x) - 1) &&
           (call_.warp == 0 || call_.warp == kWarps - 1);
  }

  const Call<Kind>& call_;
  uint32_t looks_ = 0;
  int64_t begin_ = 0;
};

template <CallKind Kind>
template <bool LooksAround>
__device__ uint32_t Call<Kind>::await_receipts() const {
  const bool waits = lane < kRanks && seen.masked == 0;
  uint64_t word = seen.receipt;
  Patience<Kind, LooksAround> patience(*this);
  while (waits) {
    const Receipt receipt = Receipt::decode(word);
    const uint32_t received = Kind == CallKind::kDispatch ? receipt.dispatches : receipt.combines;
    // Of the calls before this one, all but the last must have been received.
    if (static_cast<int32_t>(received + kFirstEpoch + 1u - epoch) >= 0) break;
    if (patience.exhausted(lane, received)) break;
    word = load_relaxed_system(Prologue::receipts(args) + lane);
  }
  return live_ranks();
}

template <CallKind Kind>
template <bool LooksAround>
__device__ CallWord Call<Kind>::await_call(int source) const {
  Patience<Kind, LooksAround> patience(*this);
  CallWord word{};
  do {
    word = CallWord::decode(load_relaxed_system(call_word(args.rank, source)));
  } while (word.epoch != (epoch & 0xffffu) && !patience.exhausted(source));
  if (word.epoch != (epoch & 0xffffu)) return CallWord{0, false, false, 0, ~0u};  // of no call
  if (word.refused || (word.facts != args.facts && args.refused == 0)) word.tokens = 0;
  return word;
}

// Tells every peer which calls this rank has received whole: all that its kernels before this one
// were to receive. A peer that sees it writes into the memory that those calls have read and made
// absent, so it is a release.
__device__ __forceinline__ void push_receipts(const CallArgs& args, const Prologue& seen) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  if (lane >= kRanks || seen.masked != 0) return;
  // The counters of this CTA: those of others may tell of this very kernel already.
  const auto& epochs = args.state->epochs;
  const Receipt receipts{epochs[0][blockIdx.x].receive - kFirstEpoch,
                         epochs[1][blockIdx.x].receive - kFirstEpoch};
  auto* theirs = reinterpret_cast<uint64_t*>(args.peers[lane] + args.at.receipts);
  store_release_system(theirs + writer_at(args, lane), receipts.encode());
}

// Publishes which kernel this rank is in (Progress), before it waits for anybody.
template <CallKind Kind>
__device__ __forceinline__ void publish_progress(const CallArgs& args) {
  if (threadIdx.x % kWarpLanes != 0) return;
  // Where routing is late it has room for headers of its own.
  const bool is_late = args.at.rows != args.at.late_headers;
  Progress own = Progress::of(Kind, args.phases, Kind == CallKind::kCombine && is_late);
  for (int k = 0; k < 2; ++k) {
    const CtaEpochs before = args.state->epochs[k][blockIdx.x];
    const bool begins = k == static_cast<int>(Kind) && (args.phases & kSend) != 0;
    own = own.with_counts(k, before.send - kFirstEpoch + (begins ? 1u : 0u),
                          before.receive - kFirstEpoch);
  }
  store_relaxed_system(progress_word(args, args.rank), own.word);
}

// Whether an earlier call has failed. That this one has must not count: the threads of a CTA look
// at different moments, and all must go the same way, or some wait at a barrier for others that
// left.
__device__ __forceinline__ bool failed_before(const Prologue& seen, CallKind kind) {
  return seen.failed != 0 && seen.failed != call_id(kind, seen.epochs.send) &&
         seen.failed != call_id(kind, seen.epochs.receive);
}

// Runs `body` and counts the call, unless an earlier one has failed or `is_void(...)`. Every CTA
// counts for itself, so the grid needs no barrier. The last warp of CTA `teller` pushes receipts
// first: as the release takes its time, one that nobody waits for meanwhile.
template <CallKind Kind, class IsVoid, class Body>
__device__ __forceinline__ void run_call(const CallArgs& args, int teller, IsVoid is_void,
                                         Body body) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const bool nothing = is_void();  // asked for together with the following
  const Prologue seen = Prologue::load(args, Kind);
  const bool tells = static_cast<int>(blockIdx.x) == teller &&
                     static_cast<int>(threadIdx.x) / kWarpLanes == kWarps - 1;
  if (tells) push_receipts(args, seen);
  if (nothing || failed_before(seen, Kind)) return;
  if (tells) publish_progress<Kind>(args);
  // Kept in shared memory, as every register counts in between.
  __shared__ CtaEpochs next;
  if (threadIdx.x == 0) {
    next = {seen.epochs.send + (args.phases & kSend ? 1u : 0u),
            seen.epochs.receive + (args.phases & kReceive ? 1u : 0u)};
  }
  body(seen);
  __syncthreads();
  if (threadIdx.x == 0) args.state->epochs[static_cast<int>(Kind)][blockIdx.x] = next;
}

}  // namespace fanfold
