#include "host/low_latency.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "host/low_latency_checks.h"
#include "host/numeric.h"
#include "host/row_copy.h"

namespace fanfold {
namespace {

// Values of the `encodings` area.
constexpr uint8_t kResultBf16 = 0;
constexpr uint8_t kResultLogFmt = 1;

// Refuses the next call if `check` throws BadArgument for an array of this rank.
template <typename Check>
void require_lent(LowLatencySequence& sequence, const Check& check) {
  try {
    check();
  } catch (const BadArgument& error) {
    sequence.refuse(error.what());
    throw;
  }
}

int32_t first_of(int64_t range) { return static_cast<int32_t>(range >> 32); }

}  // namespace

LowLatency::LowLatency(SymmetricMemory& memory, int64_t offset, int64_t bytes, uint32_t epoch)
    : memory_(memory), offset_(offset), bytes_(bytes),
      dispatch_(memory, offset, Phase::kLowLatencyDispatch, epoch),
      combine_(memory, offset, Phase::kLowLatencyCombine, epoch) {
  if (offset + bytes > memory.bytes() || bytes < LowLatencySignals{memory.ranks()}.bytes()) {
    throw BadArgument("bytes", std::to_string(bytes), "within the symmetric memory");
  }
}

void LowLatency::quiesce() {
  memory_.check_usable();
  dispatch_.quiesce();
  combine_.quiesce();
}

void LowLatency::reset() {
  dispatch_.give_up();
  combine_.give_up();
  quiesce();
}

void LowLatency::check_fits(const LowLatencyGeometry& geometry) const {
  if (geometry.ranks != memory_.ranks()) {
    throw BadArgument("ranks", std::to_string(geometry.ranks), std::to_string(memory_.ranks()));
  }
  const int64_t wanted = LowLatencyLayout{geometry}.bytes();
  if (wanted > bytes_) {
    throw BadArgument("symmetric memory", std::to_string(bytes_) + " bytes",
                      "at least " + std::to_string(wanted) + " bytes for this geometry");
  }
}

// Waits until every peer has read all rows of this rank.
void LowLatency::await_idle(bool new_layout) {
  for (int32_t peer = 0; peer < memory_.ranks() && new_layout && laid_out_; ++peer) {
    if (!memory_.masked(peer)) continue;
    // A masked rank may still write to its slots of the old layout, which the new layout may give
    // to other ranks.
    throw Misuse("rank " + std::to_string(peer) +
                 " is masked, so the geometry cannot change: it may come back with the old one");
  }
  quiesce();
}

void LowLatency::adopt(const LowLatencyGeometry& geometry) {
  layout_ = LowLatencyLayout{geometry};
  laid_out_ = true;
  const int32_t locals = geometry.experts_per_rank();
  local_topk_ = LocalTopK(memory_.rank() * locals, locals);
  slot_.resize(static_cast<size_t>(layout_.row_stride()));
  sum_.resize(static_cast<size_t>(geometry.hidden));
}

uint32_t LowLatency::begin(LowLatencySequence& sequence, const LowLatencyGeometry& geometry,
                           RowEncoding encoding, Weights weights) {
  memory_.check_usable();
  check_fits(geometry);
  const bool new_layout = !laid_out_ || !(geometry == layout_.geometry);
  const bool new_weights =
      weights != Weights::kNone && weights_ != Weights::kNone && weights != weights_;
  if (new_layout || new_weights) {
    try {
      await_idle(new_layout);
    } catch (const Misuse& misuse) {
      sequence.refuse(misuse.what());
      throw;
    }
  }
  const uint32_t epoch = sequence.begin(LowLatencySignature{
      .experts = geometry.experts,
      .top_k = geometry.top_k,
      .hidden = geometry.hidden,
      .max_tokens = geometry.max_tokens,
      .encoding = static_cast<int32_t>(encoding),
      .weights = static_cast<int32_t>(weights),
      .reserved = {},
  });
  // Rows that this rank sent before all ranks agree would overwrite rows that peers still read. If
  // the ranks do not agree, the layout stays as it was.
  if (new_layout || new_weights) sequence.agree(epoch);
  if (new_layout || weights != Weights::kNone) weights_ = weights;
  if (new_layout) adopt(geometry);
  return epoch;
}

// --- Dispatch -------------------------------------------------------------------------------

uint32_t LowLatency::dispatch_send(const LowLatencyGeometry& geometry,
                                   const LowLatencyTokens& tokens) {
  require_lent(dispatch_, [&] { check_lent(geometry, tokens); });
  const uint32_t epoch = begin(dispatch_, geometry, tokens.encoding,
                               tokens.weighted ? Weights::kWithDispatch : Weights::kNone);
  push_routing(tokens, epoch, layout_.experts_offset());
  push_rows(tokens, epoch);
  for (int32_t peer = 0; peer < memory_.ranks(); ++peer) {
    if (!memory_.masked(peer)) dispatch_.publish(epoch, peer, tokens.tokens);
  }
  return epoch;
}

void LowLatency::push_routing(const LowLatencyTokens& tokens, uint32_t epoch,
                              int64_t experts_table) const {
  const int64_t entries = int64_t{tokens.tokens} * layout_.geometry.top_k;
  const int64_t experts = experts_offset(experts_table, memory_.rank(), epoch);
  for (int32_t rank = 0; rank < memory_.ranks(); ++rank) {
    if (memory_.masked(rank)) continue;
    const Peer& to = memory_.peer(rank);
    std::transform(tokens.topk_idx.data(), tokens.topk_idx + entries,
                   reinterpret_cast<int16_t*>(to.place(experts)),
                   [](int64_t expert) { return static_cast<int16_t>(expert); });
    to.put(experts, entries * 2);
    if (!tokens.weighted) continue;
    to.put(weights_offset(memory_.rank(), epoch), tokens.topk_weights.data(), entries * 4);
  }
}

// The row of `token` as it travels: the caller's, or made in `slot_`.
const std::byte* LowLatency::encode(const LowLatencyTokens& tokens, int64_t token) {
  const int64_t hidden = layout_.geometry.hidden;
  const uint16_t* x = tokens.x + token * hidden;
  if (tokens.encoding == RowEncoding::kBf16) return reinterpret_cast<const std::byte*>(x);
  // The values end on a 16-byte boundary, so the scales behind them are aligned.
  auto* values = reinterpret_cast<uint8_t*>(slot_.data());
  std::byte* scales = slot_.data() + value_bytes(tokens.encoding, hidden);
  if (tokens.encoding == RowEncoding::kNvfp4) {
    quantize_nvfp4_row(x, hidden, tokens.global_scale[0], values,
                       reinterpret_cast<uint8_t*>(scales));
  } else {
    const ScaleRounding rounding = tokens.encoding == RowEncoding::kFp8PowerOfTwo
                                       ? ScaleRounding::kPowerOfTwo
                                       : ScaleRounding::kNone;
    quantize_fp8_row(x, hidden, rounding, values, reinterpret_cast<float*>(scales));
  }
  return slot_.data();
}

void LowLatency::push_rows(const LowLatencyTokens& tokens, uint32_t epoch) {
  const LowLatencyGeometry& g = layout_.geometry;
  const int64_t bytes = row_bytes(tokens.encoding, g.hidden);
  std::vector<uint8_t> reached_rank(static_cast<size_t>(g.ranks));
  std::vector<int64_t> sent(static_cast<size_t>(g.ranks), 0);
  std::vector<RowRun> runs;
  runs.reserve(static_cast<size_t>(g.ranks));
  for (int32_t rank = 0; rank < g.ranks; ++rank) runs.emplace_back(memory_.peer(rank));
  for (int32_t token = 0; token < tokens.tokens; ++token) {
    const int64_t* experts = tokens.topk_idx + int64_t{token} * g.top_k;
    const std::byte* row = encode(tokens, token);
    std::fill(reached_rank.begin(), reached_rank.end(), uint8_t{0});
    for (int32_t k = 0; k < g.top_k; ++k) {
      if (experts[k] < 0) continue;
      const auto peer = static_cast<int32_t>(experts[k] / g.experts_per_rank());
      if (std::exchange(reached_rank[static_cast<size_t>(peer)], uint8_t{1}) != 0) continue;
      if (memory_.masked(peer)) continue;
      const int64_t slot = layout_.slot(parity_of(epoch), memory_.rank(), token);
      const int64_t place = offset_ + layout_.rows_offset() + slot * layout_.row_stride();
      std::memcpy(memory_.peer(peer).place(place), row, static_cast<size_t>(bytes));
      runs[static_cast<size_t>(peer)].put(place, bytes);
      ++sent[static_cast<size_t>(peer)];
    }
  }
  for (RowRun& run : runs) run.finish();
  for (int32_t peer = 0; peer < g.ranks; ++peer) {
    const int64_t rows = sent[static_cast<size_t>(peer)];
    memory_.rows().sent(Phase::kLowLatencyDispatch, peer, rows, rows * bytes);
  }
}

void LowLatency::dispatch_receive(uint32_t epoch, const LowLatencyReceived& received) {
  dispatch_.require_in_flight(epoch);
  const LowLatencyGeometry& geometry = layout_.geometry;
  check_lent(geometry, received);
  cursors_.assign(static_cast<size_t>(geometry.experts_per_rank()), 0);
  for (int32_t source = 0; source < geometry.ranks; ++source) {
    unpack(source, dispatch_.await(epoch, source, received.wait_ns), epoch, received);
  }
  for (int32_t e = 0; e < geometry.experts_per_rank(); ++e) {
    const auto rows = static_cast<int32_t>(cursors_[static_cast<size_t>(e)]);
    received.counts[e] = rows;
    if (received.expert_totals != nullptr && !dispatch_.is_aborted(epoch)) {
      received.expert_totals[e] += rows;
    }
  }
  memory_.rows().received(memory_.rank() * geometry.experts_per_rank(),
                          {received.counts.data(), cursors_.size()});
  dispatch_.finish(epoch);
}

void LowLatency::unpack(int32_t source, int32_t tokens, uint32_t epoch,
                        const LowLatencyReceived& received) {
  const LowLatencyGeometry& g = layout_.geometry;
  const int64_t first = layout_.slot(parity_of(epoch), source, 0);
  const bool weighted = received.weights != nullptr || received.row_weights != nullptr;
  const Table table = own_table(layout_.experts_offset(), source, epoch, weighted);
  const std::vector<int64_t> before = cursors_;
  place(tokens, table, received);
  for (int32_t e = 0; e < g.experts_per_rank(); ++e) {
    const int64_t begin = before[static_cast<size_t>(e)];
    const int64_t count = cursors_[static_cast<size_t>(e)] - begin;
    received.ranges[int64_t{e} * g.ranks + source] = count | (begin << 32);
  }
  const int64_t bytes = value_bytes(received.encoding, g.hidden);
  const auto placed = static_cast<int64_t>(placements_.size());
  const RowCopy copy(placed * bytes * g.ranks,
                     g.ranks);  // assumes as many bytes from every source
  for (const Placement& to : placements_) {
    const int64_t offset = layout_.rows_offset() + (first + to.token) * layout_.row_stride();
    const std::byte* slot = own(offset);
    copy(received.rows + (to.local * g.expert_capacity() + to.row) * bytes, slot, bytes);
    if (received.encoding == RowEncoding::kNvfp4) {
      unpack_nvfp4_scales(slot, to, received);
    } else if (received.encoding != RowEncoding::kBf16) {
      unpack_scales(slot, to, received);
    }
  }
  const int64_t kept = int64_t{source} * g.max_tokens * g.top_k;
  const int64_t entries = int64_t{tokens} * g.top_k;
  if (received.source_counts != nullptr) received.source_counts[source] = tokens;
  if (received.experts != nullptr) std::copy_n(table.experts, entries, received.experts + kept);
  if (received.weights != nullptr) std::copy_n(table.weights, entries, received.weights + kept);
}

// Appends the rows of one source to the rows of their local experts.
void LowLatency::place(int32_t tokens, const Table& table, const LowLatencyReceived& received) {
  const LowLatencyGeometry& g = layout_.geometry;
  placements_.clear();
  for (int32_t token = 0; token < tokens; ++token) {
    const int64_t first_entry = int64_t{token} * g.top_k;
    const float* weights = table.weights == nullptr ? nullptr : table.weights + first_entry;
    for (const auto& entry : local_topk_.of(table.experts + first_entry, weights, g.top_k)) {
      const int64_t row = cursors_[static_cast<size_t>(entry.local)]++;
      const int64_t place = entry.local * g.expert_capacity() + row;
      received.source_tokens[place] = token;
      if (received.row_weights != nullptr) received.row_weights[place] = entry.weight;
      placements_.push_back(Placement{token, entry.local, row});
    }
  }
}

void LowLatency::unpack_scales(const std::byte* slot, const Placement& to,
                               const LowLatencyReceived& received) const {
  const LowLatencyGeometry& g = layout_.geometry;
  const int64_t capacity = g.expert_capacity();
  const int64_t blocks = blocks_of(g.hidden);
  const bool packed = received.scale_format == ScaleFormat::kUe8m0;
  const int64_t words = packed ? ceil_div(blocks, 4) : blocks;
  // Scales of adjacent rows of an expert are adjacent, as grouped GEMMs read them.
  auto* column =
      reinterpret_cast<uint32_t*>(received.scales.data()) + to.local * words * capacity + to.row;
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

void LowLatency::unpack_nvfp4_scales(const std::byte* slot, const Placement& to,
                                     const LowLatencyReceived& received) const {
  const LowLatencyGeometry& g = layout_.geometry;
  const Nvfp4ScaleLayout layout{g.expert_capacity(), g.hidden};
  const std::byte* scales = slot + nvfp4_value_bytes(g.hidden);
  std::byte* tiles = received.scales + to.local * layout.words() * 4;
  const int64_t count = g.hidden / kNvfp4BlockColumns;
  for (int64_t column = 0; column < layout.columns(); ++column) {
    std::byte word[4] = {};  // zeros behind the last column: nothing times a NaN
    std::copy_n(scales + column * 4, std::min<int64_t>(4, count - column * 4), word);
    std::memcpy(tiles + layout.word(to.row, column) * 4, word, sizeof word);
  }
}

// --- Combine --------------------------------------------------------------------------------

uint32_t LowLatency::combine_send(const LowLatencyGeometry& geometry,
                                  const LowLatencyOutputs& outputs) {
  require_lent(combine_, [&] { check_lent(geometry, outputs); });
  const LowLatencyTokens* late = outputs.late_tokens;
  const Weights weights = late != nullptr              ? Weights::kWithCombine
                          : outputs.weights != nullptr ? Weights::kWithDispatch
                                                       : Weights::kNone;
  const uint32_t epoch = begin(combine_, geometry, RowEncoding::kBf16, weights);
  if (late != nullptr) {
    push_routing(*late, epoch, layout_.late_experts_offset());
    for (int32_t peer = 0; peer < geometry.ranks; ++peer) {
      if (!memory_.masked(peer)) combine_.publish_late_routing(epoch, peer, late->tokens);
    }
  }
  // Each rank begins with its successor, so that not all ranks write to rank 0 first.
  for (int32_t step = 1; step <= geometry.ranks; ++step) {
    const int32_t source = (memory_.rank() + step) % geometry.ranks;
    if (memory_.masked(source)) continue;
    const int32_t tokens = late != nullptr ? combine_.await_late_routing(epoch, source)
                                           : outputs.source_counts[source];
    gather(source, tokens, table_of(source, epoch, outputs), outputs);
    RowRun run(memory_.peer(source));
    int64_t bytes = 0;
    for (size_t sum = 0; sum < sums_.size(); ++sum) {
      if (outputs.ready.signals != nullptr) await_outputs(sum, outputs.ready);
      bytes += write_result(source, sum, epoch, outputs.logfmt, run);
    }
    run.finish();
    memory_.rows().sent(Phase::kLowLatencyCombine, source, static_cast<int64_t>(sums_.size()),
                        bytes);
    memory_.peer(source).put(offset_ + encoding_offset(memory_.rank(), 0, epoch), tokens);
    combine_.publish(epoch, source, static_cast<int32_t>(sums_.size()));
  }
  return epoch;
}

// The routing that `source` has pushed into this rank's memory.
LowLatency::Table LowLatency::own_table(int64_t table, int32_t source, uint32_t epoch,
                                        bool weighted) const {
  const auto at = [this](int64_t offset) { return memory_.own() + offset; };
  const int64_t weights = weights_offset(source, epoch);
  return Table{reinterpret_cast<const int16_t*>(at(experts_offset(table, source, epoch))),
               weighted ? reinterpret_cast<const float*>(at(weights)) : nullptr};
}

LowLatency::Table LowLatency::table_of(int32_t source, uint32_t epoch,
                                       const LowLatencyOutputs& outputs) const {
  if (outputs.late_tokens != nullptr) {
    return own_table(layout_.late_experts_offset(), source, epoch, true);
  }
  const int64_t kept = int64_t{source} * layout_.geometry.max_tokens * layout_.geometry.top_k;
  return Table{outputs.experts + kept,
               outputs.weights == nullptr ? nullptr : outputs.weights + kept};
}

// Collects the outputs that go back to `source` in `sums_` and `terms_`.
void LowLatency::gather(int32_t source, int32_t tokens, const Table& table,
                        const LowLatencyOutputs& outputs) {
  const LowLatencyGeometry& g = layout_.geometry;
  // The rows of one source are in token order in each expert's block, so one cursor per expert
  // finds them.
  cursors_.resize(static_cast<size_t>(g.experts_per_rank()));
  for (int32_t e = 0; e < g.experts_per_rank(); ++e) {
    cursors_[static_cast<size_t>(e)] = first_of(outputs.ranges[int64_t{e} * g.ranks + source]);
  }
  terms_.clear();
  sums_.clear();
  signal_of_term_.clear();
  const LowLatencyReady& ready = outputs.ready;
  for (int32_t token = 0; token < tokens; ++token) {
    const int64_t first_entry = int64_t{token} * g.top_k;
    const float* weights = table.weights == nullptr ? nullptr : table.weights + first_entry;
    const auto& entries = local_topk_.of(table.experts + first_entry, weights, g.top_k);
    if (entries.empty()) continue;
    sums_.push_back(Sum{token, terms_.size()});
    for (const auto& entry : entries) {
      // A late routing may name more rows than its dispatch sent, so clamp to the block.
      const int64_t row =
          std::min(cursors_[static_cast<size_t>(entry.local)]++, g.expert_capacity() - 1);
      const int64_t place = entry.local * outputs.expert_stride + row * outputs.row_stride;
      terms_.push_back(ReduceTerm{outputs.y + place, entry.weight});
      if (ready.signals == nullptr) continue;
      signal_of_term_.push_back(entry.local * int64_t{ready.blocks} + row / ready.block_rows);
    }
  }
}

void LowLatency::await_outputs(size_t sum, const LowLatencyReady& ready) const {
  const auto first = static_cast<size_t>(terms_of(sum).data() - terms_.data());
  for (size_t term = first; term < first + terms_of(sum).size(); ++term) {
    const int64_t signal = signal_of_term_[term];
    const auto value = [&] { return load_acquire_system(ready.signals + signal); };
    const auto start = std::chrono::steady_clock::now();
    const bool came =
        memory_.poll(Phase::kLowLatencyCombine, [&] { return value() >= ready.ready_at; });
    if (came) continue;
    throw SignalTimeout(
        {.rank = memory_.rank(),
         .phase = name_of(Phase::kLowLatencyCombine),
         .expert = static_cast<int32_t>(signal / ready.blocks),
         .block = static_cast<int32_t>(signal % ready.blocks),
         .value = value(),
         .expected = ready.ready_at,
         .seconds =
             std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()});
  }
}

// The terms of sum `sum`; empty for the index behind the last one.
std::span<const ReduceTerm> LowLatency::terms_of(size_t sum) const {
  const auto begin_of = [&](size_t i) {
    return i < sums_.size() ? sums_[i].first_term : terms_.size();
  };
  return std::span(terms_).subspan(begin_of(sum), begin_of(sum + 1) - begin_of(sum));
}

// Computes a sum and writes it to the token's rank. Returns its bytes.
int64_t LowLatency::write_result(int32_t source, size_t sum, uint32_t epoch, bool logfmt,
                                 RowRun& run) {
  const int32_t hidden = layout_.geometry.hidden;
  const int64_t slot = layout_.slot(parity_of(epoch), memory_.rank(), sums_[sum].token);
  const int64_t result = offset_ + layout_.results_offset() + slot * layout_.row_stride();
  const Peer& to = memory_.peer(source);
  std::byte* row = to.place(result);
  const int64_t code = offset_ + encoding_offset(memory_.rank(), sums_[sum].token, epoch);
  auto* encoding = reinterpret_cast<uint8_t*>(to.place(code));
  const std::span<const ReduceTerm> terms = terms_of(sum);
  *encoding = kResultBf16;
  if (logfmt) {
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    for (const ReduceTerm& term : terms) {
      add_weighted_bf16(term.row, term.weight, hidden, sum_.data());
    }
    if (encode_logfmt_row(sum_.data(), hidden, row)) {
      *encoding = kResultLogFmt;
      run.put(result, logfmt_row_bytes(hidden));
      return logfmt_row_bytes(hidden);
    }
  }
  reduce_bf16(terms, {}, hidden, reinterpret_cast<uint16_t*>(row), terms_of(sum + 1));
  run.put(result, bf16_row_bytes(hidden));
  return bf16_row_bytes(hidden);
}

void LowLatency::combine_receive(uint32_t epoch, const LowLatencyResult& result) {
  combine_.require_in_flight(epoch);
  const LowLatencyGeometry& geometry = layout_.geometry;
  check_lent(geometry, result);
  for (int32_t peer = 0; peer < geometry.ranks; ++peer) {
    combine_.await(epoch, peer, result.wait_ns);
  }
  const int32_t tokens = combine_.is_aborted(epoch) ? 0 : result.tokens;
  for (int64_t token = 0; token < tokens; ++token) {
    add_results(result.topk_idx + token * geometry.top_k, token, epoch,
                result.out + token * geometry.hidden);
  }
  combine_.finish(epoch);
}

// out = the sum of the token's result rows from the ranks that hold one of the experts `ids`.
void LowLatency::add_results(const int64_t* ids, int64_t token, uint32_t epoch, uint16_t* out) {
  const LowLatencyGeometry& g = layout_.geometry;
  contributes_.assign(static_cast<size_t>(g.ranks), 0);
  for (int32_t k = 0; k < g.top_k; ++k) {
    // The caller may have overwritten its indices between the send and the receive.
    if (ids[k] < 0 || ids[k] >= g.experts) continue;
    contributes_[static_cast<size_t>(ids[k] / g.experts_per_rank())] = 1;
  }
  terms_.clear();
  bool logfmt = false;
  for (int32_t peer = 0; peer < g.ranks; ++peer) {
    if (contributes_[static_cast<size_t>(peer)] == 0 || memory_.masked(peer)) continue;
    terms_.push_back(ReduceTerm{reinterpret_cast<const uint16_t*>(result_row(peer, token, epoch)),
                                1.0f});  // multiplying by 1 is exact
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
