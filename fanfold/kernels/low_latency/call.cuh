// What every low-latency kernel does around its rows: which call this is, what it awaits from every
// peer, and the acknowledgements that let peers use a half of the memory again.
#pragma once

#include "layout/low_latency_hosts.h"
#include "protocol/acks.cuh"
#include "protocol/deadline.cuh"
#include "protocol/other_calls.cuh"
#include "protocol/rank_set.cuh"
#include "protocol/wire.cuh"

namespace fanfold {

static_assert(kRanks <= kMostRanks && kExperts <= kMostDeviceExperts);

// What a source counts for each rank: the rows of its experts and, where rows are token-major, the
// rows of the rank (kTokenMajor; one host only).
inline constexpr int kCounts = kLocalExperts + kTokenMajor;
static_assert(kTokenMajor == 0 || kAcrossHosts == 0);

// Whether no word is the sentinel. Every word is judged by itself: nothing is assumed of how the
// words of a row, or of one 16-byte store, become visible.
__device__ __forceinline__ bool arrived(uint4 v) {
  return v.x != kSentinel && v.y != kSentinel && v.z != kSentinel && v.w != kSentinel;
}
__device__ __forceinline__ uint4 sentinels() {
  return {kSentinel, kSentinel, kSentinel, kSentinel};
}

// For words that we did not make: two NaNs with every bit set lose their sign.
__device__ __forceinline__ uint32_t escape_sentinel(uint32_t word) {
  return word == kSentinel ? 0x7fffffffu : word;
}

// What every thread asks for first, all at once, and looks at as late as it can.
struct Prologue {
  CtaEpochs epochs;
  uint32_t failed;  // of LowLatencyState
  int32_t masked;   // lane r: whether rank r is, of few ranks
  // Of few ranks with kAcrossHosts: bit r: rank r is on another host.
  uint32_t elsewhere;

  __device__ static Prologue load(const CallArgs& args, CallKind kind) {
    Prologue seen{};
    seen.epochs = args.state->epochs[static_cast<int>(kind)][blockIdx.x];
    seen.failed = args.state->failed;
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    if (kHasFewRanks && lane < kRanks) seen.masked = args.state->masked[lane];
    if constexpr (kAcrossHosts != 0 && kHasFewRanks)
      seen.elsewhere = args.state->hosts->remote.elsewhere[0];
    return seen;
  }
};

// Who writes to whom: its number to the reader, and whether that is on another host. Then what it
// writes has a place in LowLatencyHostsLayout.
struct Writer {
  int rank;
  bool elsewhere;
};

// Of rows in LowLatencyHostsLayout: the bytes of each (kBytes), and the word behind them (kWord).
template <CallKind Kind>
struct RowsOf;

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

  // ---- places in the memory of a rank, as offsets -----------------------------------------------

  __device__ int64_t slot(int writer, int token) const {
    return int64_t{half() * kRanks + writer} * args.max_tokens + token;
  }
  __device__ int64_t ack(Writer writer) const {
    if (writer.elsewhere) return LowLatencyHostsLayout::ack(writer.rank);
    return args.at.acks + int64_t{writer.rank} * 8;
  }
  __device__ int64_t call_word(Writer writer) const {
    constexpr auto kWord = static_cast<HostWord>(Kind);
    if (writer.elsewhere) return host_layout().word(kWord, half(), writer.rank);
    constexpr int kFirst = static_cast<int>(Kind) * kParities * kRanks;
    return args.at.calls + int64_t{kFirst + half() * kRanks + writer.rank} * 8;
  }
  // Of a writer on another host: what it stores behind its rows.
  __device__ int64_t rows_word(Writer writer) const {
    return host_layout().word(RowsOf<Kind>::kWord, half(), writer.rank);
  }
  __device__ int64_t count(Writer writer, int local) const {
    if (writer.elsewhere)
      return host_layout().block(Kind, half(), writer.rank) + int64_t{local} * 4;
    const int at = (half() * kRanks + writer.rank) * kCounts + local;
    return args.at.counts + int64_t{at} * 4;
  }
  __device__ int64_t header(Writer writer, int token, int k) const {
    if (writer.elsewhere)
      return host_layout().headers(Kind, half(), writer.rank) + (int64_t{token} * kTopK + k) * 8;
    constexpr bool kLateHeaders = Kind == CallKind::kCombine;
    const int64_t headers = kLateHeaders ? args.at.late_headers : args.at.headers;
    return headers + (slot(writer.rank, token) * kTopK + k) * 8;
  }
  __device__ int64_t row(Writer writer, int token) const {
    if (writer.elsewhere)
      return host_layout().rows(Kind, half(), writer.rank) + int64_t{token} * RowsOf<Kind>::kBytes;
    const int64_t rows = Kind == CallKind::kDispatch ? args.at.rows : args.at.results;
    return rows + slot(writer.rank, token) * args.at.row_stride;
  }
  __device__ static int64_t units(int count) { return int64_t{count} * kUnitBytes; }
  __device__ LowLatencyHostsLayout host_layout() const {
    return {{kRanks, kExperts, kTopK, kHidden, args.max_tokens}};
  }

  // What stands at an offset of the memory in which this rank receives from `writer`.
  template <class T>
  __device__ T* own_at(Writer writer, int64_t offset) const {
    if (writer.elsewhere) return reinterpret_cast<T*>(remote_hosts().received + offset);
    return own_memory<T>(args, offset);
  }
  // Where this rank's row of a token goes in the memory of `rank`.
  __device__ Peer row_at(int rank, int token) const {
    const Writer writer = writer_to(rank);
    const Peer peer = writer.elsewhere ? Peer(remote_hosts().sent_rows[rank]) : Peer(args, rank);
    return peer.from(row(writer, token));
  }
  __device__ uint4* received_row(int source, int token) const {
    const Writer writer = writer_of(source);
    const int64_t offset = row(writer, token);
    if (writer.elsewhere) return reinterpret_cast<uint4*>(remote_hosts().received_rows + offset);
    return own_memory<uint4>(args, offset);
  }

  // ---- peers ------------------------------------------------------------------------------------

  __device__ bool is_elsewhere(int rank) const {
    if constexpr (kAcrossHosts == 0) return false;
    const uint32_t word = kHasFewRanks ? seen.elsewhere : remote_hosts().elsewhere[rank / 32];
    return (word >> (rank % 32) & 1u) != 0;
  }
  // With kAcrossHosts.
  __device__ const RemoteHosts& remote_hosts() const { return args.state->hosts->remote; }
  // As this rank is to `peer`, and as `source` is to this rank.
  __device__ Writer writer_to(int peer) const { return {rank_at(args, peer), is_elsewhere(peer)}; }
  __device__ Writer writer_of(int source) const { return {source, is_elsewhere(source)}; }

  // The ranks that are not masked. All lanes of the warp ask together.
  __device__ RankSet live_ranks() const {
    return RankSet::of([this](int rank) { return is_live(rank); });
  }
  // Of few ranks: rank `lane`, when the kernel began.
  __device__ bool is_live(int rank) const {
    return kHasFewRanks ? seen.masked == 0 : !is_masked(rank);
  }
  // Ends this call's waits, and later calls at their start.
  __device__ void fail() const { store_relaxed_gpu(&args.state->failed, call_id(Kind, epoch)); }

  __device__ void report(ReportKind kind, int peer, int32_t first, int32_t second) const {
    store_report(&args.reports->kinds[static_cast<int>(kind)],
                 {reported_call(static_cast<uint32_t>(Kind), peer), epoch, first, second});
  }

  // ---- what a Deadline asks ---------------------------------------------------------------------

  static constexpr uint32_t kNothingSeen = kNoAck;

  __device__ bool failed() const { return load_relaxed_gpu(&args.state->failed) != 0; }
  __device__ bool is_masked(int peer) const { return fanfold::is_masked(args, peer); }
  static constexpr bool kAsksNetwork = kAcrossHosts != 0 && kWireKnowsLost;
  __device__ bool is_lost(int peer) const {
    return is_elsewhere(peer) && is_lost_peer(remote_hosts(), peer);
  }
  static constexpr bool kTakesArrivals = kAcrossHosts != 0 && kWireHasArrivals;
  __device__ void take_arrivals(int peer) const {
    if (is_elsewhere(peer)) fanfold::take_arrivals(*this, peer);
  }
  __device__ void time_out(int peer, uint32_t acknowledged) const {
    fanfold::time_out<Kind>(args, peer, epoch, acknowledged);
  }
  __device__ bool finds_other_call() const { return find_other_call(args); }
  // A few warps find for all whether the kernel can end: of the CTAs that wait as long as it does,
  // those that wait for every rank. The CTA that sends counts (in combine, the first) waits for all
  // acknowledgements, the last one for all calls.
  __device__ bool looks_around() const {
    if constexpr (kAcrossHosts != 0) return false;  // no rank can read what one elsewhere is in
    const int sender = Kind == CallKind::kDispatch ? args.senders : 0;
    const int cta = static_cast<int>(blockIdx.x);
    return cta == sender || cta == static_cast<int>(gridDim.x) - 1;
  }

  // ---- the course of a call ---------------------------------------------------------------------

  // One warp: returns when every live rank has received the last call but one, whose half of the
  // memory this call uses. What the warp then puts there comes after that rank's last look, and so
  // does what other warps put there behind a barrier of the CTA. One warp of each kernel that sends
  // does it with LooksAround; for the others it also looks at what ranks elsewhere have said.
  template <bool LooksAround = false>
  __device__ void await_acks() const;
  template <bool LooksAround>
  __device__ Acknowledgement look_at_ack(Writer writer) const;
  // Whether `peer`, on another host, has received the last call but one.
  __device__ bool has_free_half(int peer) const {
    const Writer writer = writer_of(peer);
    return frees_half(load_ack(own_at<const uint64_t>(writer, ack(writer))), Kind, epoch);
  }

  __device__ CallWord own_word(RowKind rows) const {
    return {static_cast<uint32_t>(args.tokens), args.refused != 0, rows, args.signature, epoch};
  }
  // Sends every live peer of this host what this call is; to others it goes behind what it is about
  // (HostSender).
  __device__ void push_call_word(RowKind rows) const {
    const CallWord word = own_word(rows);
    for_ranks_of(lane, kWarpLanes, [&](int rank) {
      const Writer writer = writer_to(rank);
      if (is_live(rank) && !writer.elsewhere)
        Peer(args, rank).put(call_word(writer), word.encode());
    });
  }

  // A word of a rank elsewhere, as it stands now. Looks at the CPU's memory come one after the
  // other, so the last CTA looks for all of the grid. What this thread reads after the word of this
  // call is what the rank sent before it.
  __device__ uint64_t look_at_word(HostWord word, Writer writer) const {
    uint64_t* seen = &args.state->hosts->seen.words[static_cast<int>(word)][writer.rank];
    if (blockIdx.x != gridDim.x - 1) return load_acquire_gpu(seen);
    const int64_t place = host_layout().word(word, half(), writer.rank);
    const uint64_t found = load_acquire_system(own_at<const uint64_t>(writer, place));
    if (CallWord::decode(found).epoch == (epoch & 0xffffu)) store_release_gpu(seen, found);
    return found;
  }

  // The call word of `source`: no tokens if it refused, is late, or makes another call. A rank that
  // itself refused takes all rows that arrive, to fill its memory with sentinels again.
  template <bool LooksAround = true>
  __device__ CallWord await_call(int source) const;

  // Reports `word` to the host if it is a refusal or of another call.
  __device__ void report_call(int source, const CallWord& word) const {
    if (args.refused != 0 || word.epoch != (epoch & 0xffffu)) return;
    if (word.refused) {
      report(ReportKind::kRefused, source, 0, 0);
    } else if (word.signature != args.signature) {
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

template <CallKind Kind>
template <bool LooksAround>
__device__ void Call<Kind>::await_acks() const {
  const auto* acks = own_memory<const uint64_t>(args, args.at.acks);
  for_ranks_of(lane, kWarpLanes, [&](int rank) {
    Deadline<Call, LooksAround> deadline(*this);
    while (is_live(rank)) {
      const Writer writer = writer_of(rank);
      const Acknowledgement ack =
          writer.elsewhere ? look_at_ack<LooksAround>(writer) : load_ack(acks + rank);
      if (frees_half(ack, Kind, epoch)) break;
      if (deadline.expired(rank, ack.of(Kind))) break;
    }
  });
  __syncwarp();
}

// Of a rank elsewhere, as one warp has seen it.
template <CallKind Kind>
template <bool LooksAround>
__device__ Acknowledgement Call<Kind>::look_at_ack(Writer writer) const {
  uint64_t* seen = &args.state->hosts->seen.acks[writer.rank];
  if constexpr (!LooksAround) return Acknowledgement::decode(load_acquire_gpu(seen));
  const Acknowledgement found = load_ack(own_at<const uint64_t>(writer, ack(writer)));
  if (frees_half(found, Kind, epoch)) store_release_gpu(seen, found.encode());
  return found;
}

template <CallKind Kind>
template <bool LooksAround>
__device__ CallWord Call<Kind>::await_call(int source) const {
  const Writer writer = writer_of(source);
  const auto* place = own_at<const uint64_t>(writer, call_word(writer));
  Deadline<Call, LooksAround> deadline(*this);
  CallWord word{};
  do {
    // Of a rank elsewhere the word says that what it sent before is there.
    word = CallWord::decode(writer.elsewhere ? look_at_word(static_cast<HostWord>(Kind), writer)
                                             : load_relaxed_system(place));
  } while (word.epoch != (epoch & 0xffffu) && !deadline.expired(source));
  constexpr CallWord kOfNoCall{0, false, RowKind::kBf16, 0, ~0u};
  if (word.epoch != (epoch & 0xffffu)) return kOfNoCall;
  if (word.refused || (word.signature != args.signature && args.refused == 0)) word.tokens = 0;
  return word;
}

// A rank that has read the rows of another host says so through the ring; the store of the command
// is the release.
template <CallKind Kind>
__device__ __forceinline__ void push_acks_to_hosts(const Call<Kind>& call) {
  __syncwarp();
  const uint64_t ack = received_calls(call.args).encode();
  const RemoteHosts& hosts = call.remote_hosts();
  for (int round = 0; round < kRankRounds; ++round) {
    const int rank = round * kWarpLanes + call.lane;
    const int peer = rank < kRanks ? rank : 0;
    const Writer writer = call.writer_to(peer);
    const bool acknowledges = rank < kRanks && writer.elsewhere && call.is_live(peer);
    push_to_each(call, acknowledges, peer, store_command(hosts, peer, call.ack(writer), ack));
  }
}

// Whether an earlier call has failed. That this one has must not count: the threads of a CTA look
// at different moments, and all must go the same way, or some wait at a barrier for others that
// left.
__device__ __forceinline__ bool failed_before(const Prologue& seen, CallKind kind) {
  return seen.failed != 0 && seen.failed != call_id(kind, seen.epochs.send) &&
         seen.failed != call_id(kind, seen.epochs.receive);
}

// Tells every peer which calls this rank has received whole. A peer that sees it writes into the
// memory that those calls have read and filled with sentinels, so it is a release.
template <CallKind Kind>
__device__ __forceinline__ void push_acks(const CallArgs& args, const Prologue& seen) {
  const Call<Kind> call(args, seen, seen.epochs.send);
  for_ranks_of(call.lane, kWarpLanes, [&](int rank) {
    if (kHasFewRanks ? seen.masked != 0 : is_masked(args, rank)) return;
    const Writer writer = call.writer_to(rank);
    if (writer.elsewhere) return;
    Peer(args, rank).signal(call.ack(writer), received_calls(args).encode());
  });
  // After a failure peers may take no words, of which a queue holds few (layout/gin.h).
  if constexpr (kAcrossHosts != 0)
    if (!failed_before(seen, Kind)) push_acks_to_hosts(call);
}

// Runs `body` and counts the call, unless an earlier one has failed or `is_aborted(...)`. Every CTA
// counts for itself, so the grid needs no barrier. The last warp of CTA `ack_cta` pushes
// acknowledgements first: as the release takes its time, a warp that nobody waits for meanwhile.
//
// With `kFewCtas` the grid is smaller than those of other calls, and leaves the other SMs to a
// kernel that it waits for: its CTAs count for those that are missing, and the next kernel, which
// would take these SMs, begins only when this one has ended.
template <CallKind Kind, bool kFewCtas = false, class IsAborted, class Body>
__device__ __forceinline__ void run_call(const CallArgs& args, int ack_cta, IsAborted is_aborted,
                                         Body body) {
  if constexpr (!kFewCtas) allow_next_kernel();
  wait_for_previous_kernel();
  const bool nothing = is_aborted();  // asked for together with the following
  const Prologue seen = Prologue::load(args, Kind);
  const bool acknowledges = static_cast<int>(blockIdx.x) == ack_cta &&
                            static_cast<int>(threadIdx.x) / kWarpLanes == kWarps - 1;
  if (acknowledges) push_acks<Kind>(args, seen);
  if (nothing || failed_before(seen, Kind)) return;
  // Where routing is late it has room for headers of its own.
  const bool needs_headers = Kind == CallKind::kCombine && args.at.rows != args.at.late_headers;
  if (acknowledges) publish_progress<Kind>(args, needs_headers);
  // Kept in shared memory, as every register counts in between.
  __shared__ CtaEpochs next;
  if (threadIdx.x == 0) {
    next = {seen.epochs.send + (args.phases & kSend ? 1u : 0u),
            seen.epochs.receive + (args.phases & kReceive ? 1u : 0u)};
  }
  body(seen);
  __syncthreads();
  if constexpr (kFewCtas) {
    // No CTA of this kernel reads what another one writes here.
    const int ctas = static_cast<int>(gridDim.x);
    int cta = static_cast<int>(blockIdx.x + threadIdx.x * gridDim.x);
    for (; cta < kMostCtas; cta += kThreads * ctas)
      args.state->epochs[static_cast<int>(Kind)][cta] = next;
  } else {
    if (threadIdx.x == 0) args.state->epochs[static_cast<int>(Kind)][blockIdx.x] = next;
  }
}

}  // namespace fanfold
