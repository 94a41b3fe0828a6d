// The low-latency mode of GPUs on several hosts: the memory through which ranks of different hosts
// reach each other, and what a kernel knows of it. docs/decisions/across-hosts.md has the protocol.
//
//   acks           [source rank]                                 u64
//   words          [HostWord][parity][source rank]               u64
//   blocks         [source rank][parity] of two: dispatch: counts, headers, rows
//                                                combine: late headers, rows
//
// A rank receives all of it in memory that the network writes, and keeps a copy for each rank of
// another host, its send area, from which the network reads: of the copy it uses its own blocks.
// A row's place depends only on its source and token, so the bytes of a command have the same
// offset in both.
//
// Nothing here is a sentinel. A word is stored after everything that its source sent before it, and
// only what it says is there is read, but for counts, which say themselves of which call they are:
// so the network may write in any order, and more than once.
#pragma once

#include "layout/low_latency_device.h"
#include "layout/remote_hosts.h"

namespace fanfold {

// What a rank sends each peer of another host behind what the word says is there.
enum class HostWord : int32_t {
  kDispatch = 0,     // a CallWord; behind counts, headers and rows
  kCombine = 1,      // a CallWord; behind late headers, if there are any
  kCombineRows = 2,  // the CallWord again; behind the rows
  kCount = 3,
};

struct LowLatencyHostsLayout {
  LowLatencyGeometry geometry;

  // Of the slots of one rank's rows of a call. Rows lie close together there, however long, so that
  // neighbours travel as one message. None is longer than a row of bf16.
  FANFOLD_HD constexpr int64_t rows_bytes() const {
    return geometry.max_tokens * align_up(bf16_row_bytes(geometry.hidden), kAreaAlignment);
  }
  FANFOLD_HD constexpr int64_t counts_bytes(CallKind kind) const {
    const int64_t counts = kind == CallKind::kDispatch ? geometry.experts_per_rank() : 0;
    return align_up(counts * int64_t{sizeof(uint32_t)}, kRowAlignment);
  }
  FANFOLD_HD constexpr int64_t header_bytes(int64_t tokens) const {
    return align_up(tokens * geometry.top_k * int64_t{sizeof(uint64_t)}, kRowAlignment);
  }
  FANFOLD_HD constexpr int64_t block_bytes(CallKind kind) const {
    const int64_t tables = counts_bytes(kind) + header_bytes(geometry.max_tokens);
    return align_up(tables, kAreaAlignment) + rows_bytes();
  }

  FANFOLD_HD static constexpr int64_t ack(int32_t source) { return int64_t{source} * 8; }
  FANFOLD_HD constexpr int64_t word(HostWord word, int32_t parity, int32_t source) const {
    const int64_t words = align_up(int64_t{geometry.ranks} * 8, kAreaAlignment);
    const int64_t table = static_cast<int64_t>(word) * kParities + parity;
    return words + (table * geometry.ranks + source) * 8;
  }
  // Acknowledgements and words end here, and the first source's blocks begin.
  FANFOLD_HD constexpr int64_t words_end() const {
    return align_up(word(HostWord::kCount, 0, 0), kAreaAlignment);
  }
  FANFOLD_HD constexpr int64_t source_bytes() const {
    return kParities * (block_bytes(CallKind::kDispatch) + block_bytes(CallKind::kCombine));
  }
  // All of a source's blocks.
  FANFOLD_HD constexpr int64_t blocks(int32_t source) const {
    return words_end() + source * source_bytes();
  }
  // Counts begin here.
  FANFOLD_HD constexpr int64_t block(CallKind kind, int32_t parity, int32_t source) const {
    const int64_t dispatch = kParities * block_bytes(CallKind::kDispatch);
    return blocks(source) + (kind == CallKind::kDispatch ? 0 : dispatch) +
           parity * block_bytes(kind);
  }
  FANFOLD_HD constexpr int64_t headers(CallKind kind, int32_t parity, int32_t source) const {
    return block(kind, parity, source) + counts_bytes(kind);
  }
  FANFOLD_HD constexpr int64_t rows(CallKind kind, int32_t parity, int32_t source) const {
    return block(kind, parity, source) + block_bytes(kind) - rows_bytes();
  }
  FANFOLD_HD constexpr int64_t bytes() const { return blocks(geometry.ranks); }
};

static_assert(LowLatencyHostsLayout{{3, 9, 1, 136, 7}}.header_bytes(1) == 16);
static_assert(LowLatencyHostsLayout{{3, 9, 1, 136, 7}}.rows(CallKind::kDispatch, 1, 2) %
                  kAreaAlignment ==
              0);

// What one CTA has seen of acknowledgements, words and counts in the memory of the CPU, for the
// others.
struct HostsSeen {
  uint64_t acks[kMostRanks];
  uint64_t words[static_cast<int>(HostWord::kCount)][kMostRanks];  // of either parity
  uint32_t counts[kParities][kMostDeviceExperts];                  // [parity][source, local expert]
};

// In the memory of a rank's GPU, where ranks are on several hosts.
struct LowLatencyHosts {
  RemoteHosts remote;  // what is received there is a LowLatencyHostsLayout
  HostsSeen seen;
  // CTAs that have stored all that they send of a call: headers, rows. The last one sets it to 0.
  uint32_t finished_headers;
  uint32_t finished_rows;
};

}  // namespace fanfold
