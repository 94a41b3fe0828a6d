#include "bindings/cuda_low_latency_fast_path.h"

namespace nb = nanobind;

namespace fanfold::bindings {
namespace {

// Kernels read and write rows in units of kUnitBytes.
bool is_aligned(const std::byte* rows) {
  return reinterpret_cast<uintptr_t>(rows) % kUnitBytes == 0;
}

bool overlap(const std::byte* a, int64_t a_bytes, const std::byte* b, int64_t b_bytes) {
  const auto from_a = reinterpret_cast<uintptr_t>(a);
  const auto from_b = reinterpret_cast<uintptr_t>(b);
  return from_a < from_b + static_cast<uintptr_t>(b_bytes) &&
         from_b < from_a + static_cast<uintptr_t>(a_bytes);
}

template <typename Target>
Target* as(std::byte* address) {
  return reinterpret_cast<Target*>(address);
}

}  // namespace

FastPath::FastPath(Handle like, const LowLatencyGeometry& geometry, const RoutingOffsets& offsets)
    : reader_(TensorReader::of(like.type())), geometry_(geometry), offsets_(offsets) {
  if (const auto view = read(like)) {
    device_ = view->tensor.device;
  } else {
    reader_.reset();
  }
}

std::optional<TensorView> FastPath::read(Handle object) const {
  return reader_ ? reader_->read(object) : std::nullopt;
}

int32_t FastPath::dispatch(DispatchArgs& args, Handle x, Handle topk_idx,
                           Handle topk_weights) const {
  const auto rows = read(x);
  if (!rows) return kUndecided;
  const int32_t tokens = tokens_of(*rows);
  if (tokens == kUndecided) return kUndecided;
  if (!is_plain(*rows, dlpack::kBfloat16, {tokens, geometry_.hidden})) return kUndecided;
  if (!is_aligned(rows->address())) return kUndecided;
  if (!read_routing(args, tokens, topk_idx, topk_weights)) return kUndecided;
  args.x = as<unsigned char>(rows->address());
  return tokens;
}

bool FastPath::read_routing(DispatchArgs& args, int32_t tokens, Handle topk_idx,
                            Handle topk_weights) const {
  const auto indices = plain(topk_idx, dlpack::kInt64, {tokens, geometry_.top_k});
  if (!indices) return false;
  if (!topk_weights.is_none()) {
    const auto weights = plain(topk_weights, dlpack::kFloat32, {tokens, geometry_.top_k});
    if (!weights) return false;
    args.topk_weights = as<float>(*weights);
  }
  args.call.tokens = tokens;
  args.topk_idx = as<int64_t>(*indices);
  return true;
}

int32_t FastPath::token_rows(DispatchArgs& args, Handle x, Handle scales, Handle topk_idx,
                             Handle topk_weights) const {
  if (scales.is_none()) return dispatch(args, x, topk_idx, topk_weights);
  const auto rows = read(x);
  const auto factors = read(scales);
  if (!rows || !factors) return kUndecided;
  const int32_t tokens = tokens_of(*rows);
  if (tokens == kUndecided) return kUndecided;
  if (!is_plain(*rows, dlpack::kFloat8E4m3fn, {tokens, geometry_.hidden})) return kUndecided;
  if (!is_aligned(rows->address())) return kUndecided;
  const bool are_scales = factors->tensor.dtype == dlpack::kFloat32 &&
                          factors->tensor.device == device_ &&
                          factors->has_shape({tokens, blocks_of(geometry_.hidden)});
  if (!are_scales || !read_routing(args, tokens, topk_idx, topk_weights)) return kUndecided;
  args.x = as<unsigned char>(rows->address());
  args.x_scales = as<uint32_t>(factors->address());
  args.x_scale_strides[0] = factors->tensor.strides[0];
  args.x_scale_strides[1] = factors->tensor.strides[1];
  return tokens;
}

int32_t FastPath::late(CombineArgs& args, Handle ranges, Handle topk_idx,
                       Handle topk_weights) const {
  const auto indices = read(topk_idx);
  if (!indices) return kUndecided;
  const int32_t tokens = tokens_of(*indices);
  if (tokens == kUndecided) return kUndecided;
  if (!is_plain(*indices, dlpack::kInt64, {tokens, geometry_.top_k})) return kUndecided;
  const auto rows = plain(ranges, dlpack::kInt64, {geometry_.experts_per_rank(), geometry_.ranks});
  const auto weights = plain(topk_weights, dlpack::kFloat32, {tokens, geometry_.top_k});
  if (!rows || !weights) return kUndecided;
  args.ranges = as<int64_t>(*rows);
  args.topk_idx = as<int64_t>(indices->address());
  args.topk_weights = as<float>(*weights);
  return tokens;
}

bool FastPath::combine(CombineArgs& args, int32_t tokens, Handle y, Handle out,
                       Handle block) const {
  const int64_t row = int64_t{2} * geometry_.hidden;
  const int64_t expert = geometry_.expert_capacity() * row;
  const int32_t experts = geometry_.experts_per_rank();
  const auto outputs =
      plain(y, dlpack::kBfloat16, {experts, geometry_.expert_capacity(), geometry_.hidden});
  const auto result = plain(out, dlpack::kBfloat16, {tokens, geometry_.hidden});
  if (!outputs || !is_aligned(*outputs) || !result || !is_aligned(*result)) return false;
  if (overlap(*outputs, experts * expert, *result, tokens * row)) return false;
  if (!block.is_none()) {
    const auto routing = read(block);
    if (!routing) return false;
    args.table = as<unsigned char>(routing->address() + offsets_.table);
  }
  args.call.tokens = tokens;
  args.y = as<unsigned char>(*outputs);
  args.expert_stride = expert;
  args.row_stride = row;
  args.out = as<unsigned char>(*result);
  return true;
}

bool FastPath::combine_rows(CombineArgs& args, int32_t tokens, int64_t rows, Handle y,
                            Handle out) const {
  const int64_t row = int64_t{2} * geometry_.hidden;
  const auto outputs = plain(y, dlpack::kBfloat16, {rows, geometry_.hidden});
  if (!outputs || !is_aligned(*outputs)) return false;
  args.call.tokens = tokens;
  args.y = as<unsigned char>(*outputs);
  args.expert_stride = geometry_.expert_capacity() * row;
  args.row_stride = row;
  args.out = as<unsigned char>(address_of(out));
  return true;
}

bool FastPath::suits(Handle x, Handle topk_idx) const {
  return has_columns(x, geometry_.hidden) && has_columns(topk_idx, geometry_.top_k);
}

bool FastPath::suits_handle(Handle y, Handle source_tokens, Handle ranges, Handle topk_idx) const {
  const int64_t experts = geometry_.experts_per_rank();
  const int64_t capacity = geometry_.expert_capacity();
  return plain(y, dlpack::kBfloat16, {experts, capacity, geometry_.hidden}) &&
         plain(source_tokens, dlpack::kInt32, {experts, capacity}) &&
         plain(ranges, dlpack::kInt64, {experts, geometry_.ranks}) &&
         has_columns(topk_idx, geometry_.top_k);
}

bool FastPath::suits_token_rows(Handle x, Handle scales, Handle topk_idx) const {
  const bool are_rows =
      scales.is_none() ? has_columns(x, dlpack::kBfloat16, geometry_.hidden)
                       : has_columns(x, dlpack::kFloat8E4m3fn, geometry_.hidden) &&
                             has_columns(scales, dlpack::kFloat32, blocks_of(geometry_.hidden));
  return are_rows && has_columns(topk_idx, geometry_.top_k);
}

bool FastPath::has_columns(Handle object, int64_t columns) const {
  const auto view = read(object);
  return view && view->tensor.dimensions == 2 && view->tensor.shape[1] == columns;
}

bool FastPath::has_columns(Handle object, dlpack::DataType dtype, int64_t columns) const {
  const auto view = read(object);
  return view && view->tensor.dtype == dtype && view->tensor.dimensions == 2 &&
         view->tensor.shape[1] == columns;
}

void FastPath::place(DispatchArgs& args, Handle rows, Handle scales, Handle counts, Handle block,
                     bool weighted) const {
  place_rows(args, rows, scales, counts);
  std::byte* const begin = address_of(block);
  args.ranges = as<int64_t>(begin);
  args.table = as<unsigned char>(begin + offsets_.table);
  args.source_tokens = as<int32_t>(begin + offsets_.source_tokens);
  if (weighted) args.row_weights = as<float>(begin + offsets_.row_weights);
}

void FastPath::place_late(DispatchArgs& args, Handle rows, Handle scales, Handle counts,
                          Handle ranges, Handle source_tokens, Handle row_weights) const {
  place_rows(args, rows, scales, counts);
  args.ranges = as<int64_t>(address_of(ranges));
  args.source_tokens = as<int32_t>(address_of(source_tokens));
  if (!row_weights.is_none()) args.row_weights = as<float>(address_of(row_weights));
}

void FastPath::place_rows(DispatchArgs& args, Handle rows, Handle scales, Handle counts) const {
  args.rows = as<unsigned char>(address_of(rows));
  if (!scales.is_none()) args.scales = as<uint32_t>(address_of(scales));
  args.counts = as<int32_t>(address_of(counts));
}

bool FastPath::is_plain(const TensorView& view, dlpack::DataType dtype,
                        std::initializer_list<int64_t> shape) const {
  return view.tensor.dtype == dtype && view.tensor.device == device_ && view.has_shape(shape) &&
         view.is_contiguous();
}

std::optional<std::byte*> FastPath::plain(Handle object, dlpack::DataType dtype,
                                          std::initializer_list<int64_t> shape) const {
  const auto view = read(object);
  if (!view || !is_plain(*view, dtype, shape)) return std::nullopt;
  return view->address();
}

int32_t FastPath::tokens_of(const TensorView& view) const {
  if (view.tensor.dimensions != 2) return kUndecided;
  const int64_t tokens = view.tensor.shape[0];
  return tokens <= geometry_.max_tokens ? static_cast<int32_t>(tokens) : kUndecided;
}

std::byte* FastPath::address_of(Handle output) const {
  if (const auto view = read(output)) return view->address();
  return reinterpret_cast<std::byte*>(nb::cast<uintptr_t>(output.attr("data_ptr")()));
}

}  // namespace fanfold::bindings
