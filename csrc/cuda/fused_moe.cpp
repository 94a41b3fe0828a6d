#include "cuda/fused_moe.h"

#include <algorithm>

#include "cuda/tensor_map.h"
#include "layout/types.h"

namespace fanfold::cuda {
namespace {

constexpr uint32_t BOX_BYTES = 128;  // what a swizzle covers

TensorMap bytes_map(uintptr_t address, const uint64_t (&sizes)[3], uint32_t box_rows,
                    const char* name) {
  return tensor_map(reinterpret_cast<const void*>(address),
                    {.type = TensorType::UINT8,
                     .sizes = {sizes[0], sizes[1], sizes[2]},
                     .strides = {sizes[0], sizes[0] * sizes[1]},
                     .box = {BOX_BYTES, box_rows},
                     .swizzle = Swizzle::BYTES_128},
                    name);
}

uint32_t box_rows(int box) { return static_cast<uint32_t>(fused_moe_box_rows(box)); }

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A part of a layer's memory.
uintptr_t at(uintptr_t memory, int64_t offset) { return memory + static_cast<uintptr_t>(offset); }

}  // namespace

int64_t FusedMoeSizes::rows() const {
  const int64_t entries = int64_t{ranks} * tokens * top_k;
  const int64_t padding = std::min<int64_t>(entries, local_experts()) * (kFusedMoeBlockRows - 1);
  return std::max<int64_t>(align_up(entries + padding, kFusedMoeBlockRows), kFusedMoeBlockRows);
}

FusedMoeLayout::FusedMoeLayout(const FusedMoeSizes& sizes) {
  constexpr int64_t ALIGNMENT = 1024;
  const int64_t row_count = sizes.rows();
  const int64_t entries = int64_t{sizes.tokens} * sizes.top_k;
  int64_t end = 0;
  const auto take = [&](int64_t part_bytes) {
    const int64_t begin = end;
    end = align_up(begin + part_bytes, ALIGNMENT);
    return begin;
  };
  state = take(sizeof(FusedMoeState));
  for (int64_t& each : shared.counters) {
    each = take(4 * FusedMoeCounters{row_count / kFusedMoeHalfRows}.words());
  }
  shared.counted = take(2 * int64_t{8} * sizes.ranks * sizes.experts);
  shared.row_calls = take(4 * row_count);
  zeroed = end;
  shared.rows = take(row_count * sizes.hidden);
  shared.row_scales = take(4 * row_count * (sizes.hidden / 128));
  shared.row_weights = take(4 * row_count);
  shared.slots = take(2 * row_count * sizes.hidden);
  activations = take(row_count * sizes.intermediate);
  activation_scales = take(4 * row_count * (sizes.intermediate / 128));
  counts = take(4 * int64_t{kFusedMoeMostCtas} * sizes.experts);
  places = take(int64_t{sizeof(FusedMoePlace)} * entries);
  copies = take(int64_t{sizeof(FusedMoeCopy)} * entries);
  tables = take(4 * int64_t{kFusedMoeMostCtas} * (2 * int64_t{sizes.local_experts()} + 1));
  bytes = end;
}

FusedMoe::FusedMoe(const FusedMoeSizes& sizes, int32_t rank, const uintptr_t* peers,
                   uintptr_t reports)
    : sizes_(sizes) {
  const FusedMoeLayout layout(sizes);
  const uintptr_t memory = peers[rank];
  const auto row_count = static_cast<uint64_t>(sizes.rows());
  const auto hidden = static_cast<uint64_t>(sizes.hidden);
  const auto intermediate = static_cast<uint64_t>(sizes.intermediate);
  const uintptr_t rows[2] = {at(memory, layout.shared.rows), at(memory, layout.activations)};
  const uint64_t depths[2] = {hidden, intermediate};
  const char* names[2] = {"rows of tokens", "activations"};
  const int64_t scales[2] = {layout.shared.row_scales, layout.activation_scales};
  const char* scale_names[2] = {"scales of tokens", "scales of activations"};
  for (int gemm = 0; gemm < 2; ++gemm) {
    const uint64_t shape[3] = {depths[gemm], row_count, 1};
    for (int box = 0; box < kFusedMoeRowBoxes; ++box) {
      fixed_.a[gemm][box] = bytes_map(rows[gemm], shape, box_rows(box), names[gemm]);
    }
    fixed_.scales[gemm] =
        tensor_map(pointer<const void>(at(memory, scales[gemm])),
                   {.type = TensorType::FLOAT32,
                    .sizes = {row_count, depths[gemm] / 128, 1},
                    .strides = {4 * row_count, 4 * row_count * (depths[gemm] / 128)},
                    .box = {kFusedMoeBlockRows, 1},
                    .swizzle = Swizzle::NONE},
                   scale_names[gemm]);
  }
  for (int box = 0; box < kFusedMoeRowBoxes; ++box) {
    fixed_.results[box] = tensor_map(pointer<const void>(at(memory, layout.shared.slots)),
                                     {.type = TensorType::BFLOAT16,
                                      .sizes = {hidden, row_count, 1},
                                      .strides = {2 * hidden, 2 * hidden * row_count},
                                      .box = {BOX_BYTES / 2, box_rows(box)},
                                      .swizzle = Swizzle::BYTES_128},
                                     "results of rows");
  }
  fixed_.peers = peer_table(peers, sizes.ranks, 0);
  fixed_.at = layout.shared;
  fixed_.activation_scales = pointer<float>(at(memory, layout.activation_scales));
  fixed_.counts = pointer<int32_t>(at(memory, layout.counts));
  fixed_.places = pointer<FusedMoePlace>(at(memory, layout.places));
  fixed_.copies = pointer<FusedMoeCopy>(at(memory, layout.copies));
  fixed_.tables = pointer<uint32_t>(at(memory, layout.tables));
  fixed_.state = pointer<FusedMoeState>(at(memory, layout.state));
  fixed_.reports = pointer<Report>(reports);
  fixed_.row_count = sizes.rows();
  fixed_.rank = rank;
}

FusedMoeArgs FusedMoe::refusal() const {
  FusedMoeArgs args = fixed_;
  args.refused = 1;
  return args;
}

FusedMoeArgs FusedMoe::arguments(const FusedMoeCall& call) const {
  const auto experts = static_cast<uint64_t>(sizes_.local_experts());
  const auto hidden = static_cast<uint64_t>(sizes_.hidden);
  const auto intermediate = static_cast<uint64_t>(sizes_.intermediate);
  FusedMoeArgs args = fixed_;
  args.l1 = bytes_map(call.l1, {hidden, 2 * intermediate, experts}, 128, "l1");
  args.l2 = bytes_map(call.l2, {intermediate, hidden, experts}, 128, "l2");
  args.x = pointer<const uint8_t>(call.x);
  args.x_scales = pointer<const float>(call.x_scales);
  args.scale_token_stride = call.scale_strides[0];
  args.scale_block_stride = call.scale_strides[1];
  args.topk_idx = pointer<const int64_t>(call.topk_idx);
  args.topk_weights = pointer<const float>(call.topk_weights);
  args.l1_scales = pointer<const float>(call.l1_scales);
  args.l2_scales = pointer<const float>(call.l2_scales);
  args.addend = pointer<const uint16_t>(call.addend);
  args.y = pointer<uint16_t>(call.y);
  args.statistics = pointer<int32_t>(call.statistics);
  args.spans = pointer<FusedMoeSpan>(call.spans);
  args.tokens = call.tokens;
  args.clamp = call.clamp;
  return args;
}

}  // namespace fanfold::cuda
