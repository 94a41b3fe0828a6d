#include "host/low_latency.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "host/numeric.h"
#include "host/reduce.h"

namespace fanfold {
namespace {

using Kind = LowLatencySignals::Kind;

// Row encodings in the `encodings` area.
constexpr uint8_t kResultBf16 = 0;
constexpr uint8_t kResultLogFmt = 1;

// Whether `ids[k]` appeared before k: a token goes to an expert once, however often it is named.
template <typename Id>
bool repeated(const Id* ids, int32_t k) {
  return std::find(ids, ids + k, ids[k]) != ids + k;
}

// The weight of the expert at k: of all the places that name it, added in order.
float weight_of(const int16_t* ids, const float* weights, int32_t k, int32_t top_k) {
  if (weights == nullptr) return 1.0f;
  float weight = weights[k];
  for (int32_t later = k + 1; later < top_k; ++later) {
    if (ids[later] == ids[k]) weight += weights[later];
  }
  return weight;
}

int32_t first_of(int64_t range) { return static_cast<int32_t>(range >> 32); }

}  // namespace

LowLatency::LowLatency(SymmetricMemory& memory, int64_t offset, int64_t bytes, uint32_t epoch)
    : memory_(memory), offset_(offset), bytes_(bytes), signals_{memory.ranks()},
      dispatch_{Phase::kLowLatencyDispatch, Kind::kDispatched, Kind::kDispatchTaken, epoch},
      combine_{Phase::kLowLatencyCombine, Kind::kCombined, Kind::kCombineTaken, epoch} {
  if (offset + bytes > memory.bytes() || bytes < signals_.bytes()) {
    throw BadArgument("bytes", std::to_string(bytes), "within the symmetric memory");
  }
}

// --- Sequence -------------------------------------------------------------------------------

void LowLatency::adopt(const LowLatencyGeometry& geometry) {
  const LowLatencyLayout wanted{geometry};
  if (wanted.bytes() > bytes_) {
    throw BadArgument("symmetric memory", std::to_string(bytes_) + " bytes",
                      "at least " + std::to_string(wanted.bytes()) + " bytes for this geometry");
  }
  if (geometry == layout_.geometry) return;
  if (layout_.geometry.ranks != 0) quiesce();
  layout_ = wanted;
  slot_.resize(static_cast<size_t>(layout_.row_stride()));
  sum_.resize(static_cast<size_t>(geometry.hidden));
}

uint32_t LowLatency::begin(Sequence& sequence) {
  memory_.check_usable();
  const uint32_t epoch = sequence.epoch + 1;
  if (sequence.in_flight[parity_of(epoch)]) {
    throw Misuse(std::string("the last call but one of ") + name_of(sequence.phase) +
                 " is still in flight, and two may be; finish it (call its hook) first");
  }
  // A parity is written again only when its previous rows have been read by the peer.
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    memory_.wait(peer, taken(sequence.taken, peer), epoch - kParities, sequence.phase);
  }
  sequence.epoch = epoch;
  sequence.in_flight[parity_of(epoch)] = true;
  sequence.refused_by[parity_of(epoch)] = -1;
  return epoch;
}

void LowLatency::finish(Sequence& sequence, uint32_t epoch) {
  sequence.in_flight[parity_of(epoch)] = false;
  // Once this call counts as taken, a refuser may write its next reason, so its last is read first.
  const int32_t refuser = sequence.refused_by[parity_of(epoch)];
  std::optional<RefusalFacts> refusal;
  if (refuser >= 0) refusal = memory_.refusal(refuser, sequence.phase, epoch);
  // Receives may come in any order, but a peer takes "taken" for all calls up to this epoch.
  const uint32_t last = sequence.epoch;
  const uint32_t all_taken = sequence.in_flight[parity_of(last - 1)] ? last - 2
                             : sequence.in_flight[parity_of(last)]   ? last - 1
                                                                     : last;
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    memory_.push(peer, taken(sequence.taken, memory_.rank()), Signal{all_taken, 0});
  }
  if (refusal) throw PeerRefused(*refusal);
}

void LowLatency::refuse(Sequence& sequence, const std::string& reason,
                        const LowLatencyGeometry* geometry) {
  if (geometry != nullptr && LowLatencyLayout{*geometry}.bytes() <= bytes_) adopt(*geometry);
  const uint32_t epoch = begin(sequence);
  memory_.set_reason(sequence.phase, epoch, reason);
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (peer == memory_.rank() || memory_.masked(peer)) continue;
    if (sequence.phase == Phase::kLowLatencyCombine) {
      memory_.push_quietly(peer, signal(Kind::kLateRouting, epoch, memory_.rank()),
                           Signal{epoch, kRefused});
    }
    memory_.push(peer, signal(sequence.arrival, epoch, memory_.rank()), Signal{epoch, kRefused});
  }
  finish(sequence, epoch);
}

void LowLatency::refuse_dispatch(const std::string& reason, const LowLatencyGeometry* geometry) {
  refuse(dispatch_, reason, geometry);
}

void LowLatency::refuse_combine(const std::string& reason, const LowLatencyGeometry* geometry) {
  refuse(combine_, reason, geometry);
}

void LowLatency::quiesce() {
  memory_.check_usable();
  for (const Sequence* sequence : {&dispatch_, &combine_}) {
    if (sequence->in_flight[0] || sequence->in_flight[1]) {
      throw Misuse(std::string("a call of ") + name_of(sequence->phase) +
                   " is in flight; finish it (call its hook) before the geometry changes");
    }
    for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
      memory_.wait(peer, taken(sequence->taken, peer), sequence->epoch, sequence->phase);
    }
  }
}

void LowLatency::require_in_flight(const Sequence& sequence, uint32_t epoch) const {
  memory_.check_usable();
  if (!sequence.in_flight[parity_of(epoch)] || !reached(sequence.epoch, epoch) ||
      reached(sequence.epoch, epoch + kParities)) {
    throw Misuse(std::string("this call of ") + name_of(sequence.phase) + " (epoch " +
                 std::to_string(epoch) + ") has been received already");
  }
}

// The number a peer's signal carries; zero for a masked peer and for one that refused, which is
// remembered: the call goes on with the others, so that all ranks stay in step, and throws last.
int32_t LowLatency::await(Sequence& sequence, Kind kind, uint32_t epoch, int32_t peer,
                          int64_t* wait_ns) {
  const auto start = std::chrono::steady_clock::now();
  const auto arrived = memory_.wait(peer, signal(kind, epoch, peer), epoch, sequence.phase);
  if (wait_ns != nullptr) {
    wait_ns[peer] += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
  }
  if (!arrived) return 0;
  if (arrived->value != kRefused) return arrived->value;
  sequence.refused_by[parity_of(epoch)] = peer;
  return 0;
}

// --- Dispatch -------------------------------------------------------------------------------

uint32_t LowLatency::dispatch_send(const LowLatencyGeometry& geometry,
                                   const LowLatencyTokens& tokens) {
  adopt(geometry);
  const uint32_t epoch = begin(dispatch_);
  push_routing(tokens, epoch, layout_.experts_offset());
  push_rows(tokens, epoch);
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (memory_.masked(peer)) continue;
    memory_.push(peer, signal(Kind::kDispatched, epoch, memory_.rank()),
                 Signal{epoch, tokens.tokens});
  }
  return epoch;
}

void LowLatency::push_routing(const LowLatencyTokens& tokens, uint32_t epoch,
                              int64_t experts_offset) {
  const int64_t entries = int64_t{tokens.tokens} * layout_.geometry.top_k;
  const int64_t first = layout_.slot(parity_of(epoch), memory_.rank(), 0) * layout_.geometry.top_k;
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (memory_.masked(peer)) continue;
    auto* experts = reinterpret_cast<int16_t*>(area(peer, experts_offset)) + first;
    std::transform(tokens.topk_idx, tokens.topk_idx + entries, experts,
                   [](int64_t expert) { return static_cast<int16_t>(expert); });
    if (tokens.topk_weights == nullptr) continue;
    auto* weights = reinterpret_cast<float*>(area(peer, layout_.weights_offset())) + first;
    std::copy_n(tokens.topk_weights, entries, weights);
  }
}

void LowLatency::push_rows(const LowLatencyTokens& tokens, uint32_t epoch) {
  const LowLatencyGeometry& g = layout_.geometry;
  const bool bf16 = tokens.encoding == RowEncoding::kBf16;
  const auto row_bytes =
      static_cast<size_t>(bf16 ? bf16_row_bytes(g.hidden) : fp8_row_bytes(g.hidden));
  const ScaleRounding rounding = tokens.encoding == RowEncoding::kFp8PowerOfTwo
                                     ? ScaleRounding::kPowerOfTwo
                                     : ScaleRounding::kNone;
  std::vector<uint8_t> reached_rank(static_cast<size_t>(g.ranks));
  for (int32_t token = 0; token < tokens.tokens; ++token) {
    const int64_t* experts = tokens.topk_idx + int64_t{token} * g.top_k;
    const uint16_t* x = tokens.x + int64_t{token} * g.hidden;
    const auto* row = reinterpret_cast<const std::byte*>(x);
    if (!bf16) {
      // An fp8 row's values end on a 16-byte boundary, so the scales behind them are aligned.
      quantize_fp8_row(x, g.hidden, rounding, reinterpret_cast<uint8_t*>(slot_.data()),
                       reinterpret_cast<float*>(slot_.data() + g.hidden));
      row = slot_.data();
    }
    std::fill(reached_rank.begin(), reached_rank.end(), uint8_t{0});
    for (int32_t k = 0; k < g.top_k; ++k) {
      if (experts[k] < 0) continue;
      const auto peer = static_cast<int32_t>(experts[k] / g.experts_per_rank());
      if (std::exchange(reached_rank[static_cast<size_t>(peer)], uint8_t{1}) != 0) continue;
      if (memory_.masked(peer)) continue;
      const int64_t slot = layout_.slot(parity_of(epoch), memory_.rank(), token);
      std::memcpy(area(peer, layout_.rows_offset() + slot * layout_.row_stride()), row, row_bytes);
    }
  }
}

void LowLatency::dispatch_receive(uint32_t epoch, const LowLatencyReceived& received) {
  require_in_flight(dispatch_, epoch);
  const LowLatencyGeometry& geometry = layout_.geometry;
  cursors_.assign(static_cast<size_t>(geometry.experts_per_rank()), 0);
  for (int32_t source = 0; source < geometry.ranks; ++source) {
    const int32_t tokens = await(dispatch_, Kind::kDispatched, epoch, source, received.wait_ns);
    unpack(source, tokens, epoch, received);
  }
  const bool refused = dispatch_.refused_by[parity_of(epoch)] >= 0;
  for (int32_t e = 0; e < geometry.experts_per_rank(); ++e) {
    const auto rows = static_cast<int32_t>(cursors_[static_cast<size_t>(e)]);
    received.counts[e] = rows;
    if (received.expert_totals != nullptr && !refused) received.expert_totals[e] += rows;
  }
  finish(dispatch_, epoch);
}

void LowLatency::unpack(int32_t source, int32_t tokens, uint32_t epoch,
                        const LowLatencyReceived& received) {
  const LowLatencyGeometry& g = layout_.geometry;
  const int32_t locals = g.experts_per_rank();
  const int32_t first_expert = memory_.rank() * locals;
  const int64_t first = layout_.slot(parity_of(epoch), source, 0);
  const auto* experts =
      reinterpret_cast<const int16_t*>(area(memory_.rank(), layout_.experts_offset())) +
      first * g.top_k;
  const auto* weights =
      reinterpret_cast<const float*>(area(memory_.rank(), layout_.weights_offset())) +
      first * g.top_k;
  const std::vector<int64_t> before = cursors_;
  for (int32_t token = 0; token < tokens; ++token) {
    const int16_t* ids = experts + int64_t{token} * g.top_k;
    for (int32_t k = 0; k < g.top_k; ++k) {
      const int32_t local = ids[k] - first_expert;
      if (local < 0 || local >= locals || repeated(ids, k)) continue;
      const int64_t row = cursors_[static_cast<size_t>(local)]++;
      const int64_t offset = layout_.rows_offset() + (first + token) * layout_.row_stride();
      unpack_row(area(memory_.rank(), offset), local, row, received);
      const int64_t place = local * g.expert_capacity() + row;
      received.source_tokens[place] = token;
      if (received.row_weights == nullptr) continue;
      received.row_weights[place] = weight_of(ids, weights + int64_t{token} * g.top_k, k, g.top_k);
    }
  }
  for (int32_t e = 0; e < locals; ++e) {
    const int64_t begin = before[static_cast<size_t>(e)];
    const int64_t count = cursors_[static_cast<size_t>(e)] - begin;
    received.ranges[int64_t{e} * g.ranks + source] = count | (begin << 32);
  }
  const int64_t kept = int64_t{source} * g.max_tokens * g.top_k;
  const int64_t entries = int64_t{tokens} * g.top_k;
  if (received.source_counts != nullptr) received.source_counts[source] = tokens;
  if (received.experts != nullptr) std::copy_n(experts, entries, received.experts + kept);
  if (received.weights != nullptr) std::copy_n(weights, entries, received.weights + kept);
}

void LowLatency::unpack_row(const std::byte* slot, int64_t expert, int64_t row,
                            const LowLatencyReceived& received) const {
  const LowLatencyGeometry& g = layout_.geometry;
  const int64_t capacity = g.expert_capacity();
  const bool bf16 = received.encoding == RowEncoding::kBf16;
  const int64_t row_bytes = bf16 ? bf16_row_bytes(g.hidden) : g.hidden;
  std::memcpy(received.rows + (expert * capacity + row) * row_bytes, slot,
              static_cast<size_t>(row_bytes));
  if (bf16) return;
  const int64_t blocks = blocks_of(g.hidden);
  const bool packed = received.scale_format == ScaleFormat::kUe8m0;
  const int64_t words = packed ? ceil_div(blocks, 4) : blocks;
  // Scales lie with the rows of an expert adjacent, as grouped matrix products read them.
  auto* column = reinterpret_cast<uint32_t*>(received.scales) + expert * words * capacity + row;
  for (int64_t word = 0; word < words; ++word) column[word * capacity] = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    float scale;
    std::memcpy(&scale, slot + g.hidden + block * 4, sizeof scale);
    if (packed) {
      column[block / 4 * capacity] |= static_cast<uint32_t>(ue8m0_of(scale)) << (block % 4 * 8);
    } else {
      std::memcpy(&column[block * capacity], &scale, sizeof scale);
    }
  }
}

// --- Combine --------------------------------------------------------------------------------

uint32_t LowLatency::combine_send(const LowLatencyGeometry& geometry,
                                  const LowLatencyOutputs& outputs) {
  adopt(geometry);
  const uint32_t epoch = begin(combine_);
  if (outputs.late_tokens != nullptr) {
    push_routing(*outputs.late_tokens, epoch, layout_.late_experts_offset());
    for (int32_t peer = 0; peer < geometry.ranks; ++peer) {
      if (memory_.masked(peer)) continue;
      memory_.push(peer, signal(Kind::kLateRouting, epoch, memory_.rank()),
                   Signal{epoch, outputs.late_tokens->tokens});
    }
  }
  // Every rank begins with the next one, so that they do not all write to rank 0 first.
  for (int32_t step = 1; step <= geometry.ranks; ++step) {
    const int32_t source = (memory_.rank() + step) % geometry.ranks;
    if (memory_.masked(source)) continue;
    const int32_t tokens = outputs.late_tokens != nullptr
                               ? await(combine_, Kind::kLateRouting, epoch, source, nullptr)
                               : outputs.source_counts[source];
    const int32_t rows = reduce_rows(source, tokens, epoch, outputs);
    memory_.push(source, signal(Kind::kCombined, epoch, memory_.rank()), Signal{epoch, rows});
  }
  return epoch;
}

int32_t LowLatency::reduce_rows(int32_t source, int32_t tokens, uint32_t epoch,
                                const LowLatencyOutputs& outputs) {
  const LowLatencyGeometry& g = layout_.geometry;
  const int32_t locals = g.experts_per_rank();
  const int32_t first_expert = memory_.rank() * locals;
  const bool late = outputs.late_tokens != nullptr;
  const int64_t pushed = layout_.slot(parity_of(epoch), source, 0) * g.top_k;
  const int64_t kept = int64_t{source} * g.max_tokens * g.top_k;
  const int16_t* experts =
      late ? reinterpret_cast<const int16_t*>(area(memory_.rank(), layout_.late_experts_offset())) +
                 pushed
           : outputs.experts + kept;
  const float* weights =
      late ? reinterpret_cast<const float*>(area(memory_.rank(), layout_.weights_offset())) + pushed
      : outputs.weights != nullptr ? outputs.weights + kept
                                   : nullptr;
  // Rows of one source lie in token order in each expert's block: a cursor for each finds them.
  cursors_.resize(static_cast<size_t>(locals));
  for (int32_t e = 0; e < locals; ++e) {
    cursors_[static_cast<size_t>(e)] = first_of(outputs.ranges[int64_t{e} * g.ranks + source]);
  }
  int32_t rows = 0;
  for (int32_t token = 0; token < tokens; ++token) {
    const int16_t* ids = experts + int64_t{token} * g.top_k;
    const float* token_weights = weights == nullptr ? nullptr : weights + int64_t{token} * g.top_k;
    terms_.clear();
    for (int32_t k = 0; k < g.top_k; ++k) {
      const int32_t local = ids[k] - first_expert;
      if (local < 0 || local >= locals || repeated(ids, k)) continue;
      const int64_t row = cursors_[static_cast<size_t>(local)]++;
      terms_.push_back(
          ReduceTerm{outputs.y + local * outputs.expert_stride + row * outputs.row_stride,
                     weight_of(ids, token_weights, k, g.top_k)});
    }
    if (terms_.empty()) continue;
    write_result(source, token, epoch, outputs.logfmt);
    ++rows;
  }
  return rows;
}

// Writes the sum of `terms_` to the token's rank.
void LowLatency::write_result(int32_t source, int64_t token, uint32_t epoch, bool logfmt) {
  const int32_t hidden = layout_.geometry.hidden;
  const int64_t slot = layout_.slot(parity_of(epoch), memory_.rank(), token);
  std::byte* row = area(source, layout_.results_offset() + slot * layout_.row_stride());
  auto* encoding = reinterpret_cast<uint8_t*>(area(source, layout_.encodings_offset() + slot));
  *encoding = kResultBf16;
  if (logfmt) {
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    for (const ReduceTerm& term : terms_) {
      add_weighted_bf16(term.row, term.weight, hidden, sum_.data());
    }
    if (encode_logfmt_row(sum_.data(), hidden, row)) {
      *encoding = kResultLogFmt;
      return;
    }
  }
  reduce_bf16(terms_, {}, hidden, reinterpret_cast<uint16_t*>(row));
}

void LowLatency::combine_receive(uint32_t epoch, const LowLatencyResult& result) {
  require_in_flight(combine_, epoch);
  const LowLatencyGeometry& geometry = layout_.geometry;
  for (int32_t peer = 0; peer < geometry.ranks; ++peer) {
    await(combine_, Kind::kCombined, epoch, peer, result.wait_ns);
  }
  const bool refused = combine_.refused_by[parity_of(epoch)] >= 0;
  for (int64_t token = 0; token < (refused ? 0 : result.tokens); ++token) {
    add_results(result.topk_idx + token * geometry.top_k, token, epoch,
                result.out + token * geometry.hidden);
  }
  finish(combine_, epoch);
}

// out = the sum of what the ranks that hold one of the experts `ids` sent for the token.
void LowLatency::add_results(const int64_t* ids, int64_t token, uint32_t epoch, uint16_t* out) {
  const LowLatencyGeometry& g = layout_.geometry;
  contributes_.assign(static_cast<size_t>(g.ranks), 0);
  for (int32_t k = 0; k < g.top_k; ++k) {
    if (ids[k] >= 0) contributes_[static_cast<size_t>(ids[k] / g.experts_per_rank())] = 1;
  }
  terms_.clear();
  bool logfmt = false;
  for (int32_t peer = 0; peer < g.ranks; ++peer) {
    if (contributes_[static_cast<size_t>(peer)] == 0 || memory_.masked(peer)) continue;
    terms_.push_back(ReduceTerm{reinterpret_cast<const uint16_t*>(result_row(peer, token, epoch)),
                                1.0f});  // a product with 1 is exact
    logfmt |= result_encoding(peer, token, epoch) == kResultLogFmt;
  }
  if (!logfmt) return reduce_bf16(terms_, {}, g.hidden, out);
  std::fill(sum_.begin(), sum_.end(), 0.0f);
  for (int32_t peer = 0; peer < g.ranks; ++peer) {
    if (contributes_[static_cast<size_t>(peer)] == 0 || memory_.masked(peer)) continue;
    const std::byte* row = result_row(peer, token, epoch);
    if (result_encoding(peer, token, epoch) == kResultLogFmt) {
      add_logfmt_row(row, g.hidden, sum_.data());
    } else {
      add_bf16(reinterpret_cast<const uint16_t*>(row), g.hidden, sum_.data());
    }
  }
  round_to_bf16(sum_.data(), g.hidden, out);
}

}  // namespace fanfold
