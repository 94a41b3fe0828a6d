// The fast path of low-latency calls without Python: reads the tensors of a call and, if they are
// as they nearly always are, fills in the kernels' arguments. If the fast path does not accept the
// tensors, the caller must validate them in Python, which accepts all of these and more.
#pragma once

#include <cstdint>
#include <optional>

#include "bindings/tensor_reader.h"
#include "layout/low_latency_device.h"

namespace fanfold::bindings {

// The offsets, in bytes, of the parts of a routing's block; the ranges are at 0.
struct RoutingOffsets {
  int64_t table;
  int64_t source_tokens;
  int64_t row_weights;
};

class FastPath {
 public:
  using Handle = nanobind::handle;
  static constexpr int32_t kUndecided = -1;

  // For tensors of `like`'s class on `like`'s device. If that class has no readable tensors, as in
  // PyTorch before 2.10, or `like` is not one, the fast path accepts nothing.
  FastPath(Handle like, const LowLatencyGeometry& geometry, const RoutingOffsets& offsets);

  // The tensors of a call.

  // Puts the tensors of a dispatch into `args` and returns its number of tokens, or returns
  // kUndecided. `topk_weights` may be None.
  int32_t dispatch(DispatchArgs& args, Handle x, Handle topk_idx, Handle topk_weights) const;
  // Like `dispatch`, of token-major rows. `scales` are those of fp8 rows, of any strides, or None
  // for bfloat16 ones.
  int32_t token_rows(DispatchArgs& args, Handle x, Handle scales, Handle topk_idx,
                     Handle topk_weights) const;
  // Like `dispatch`, for the routing of a combine with late weights.
  int32_t late(CombineArgs& args, Handle ranges, Handle topk_idx, Handle topk_weights) const;
  // Puts the tensors of a combine of `tokens` tokens into `args`, or returns false. `block` is the
  // block of the routing, or None.
  bool combine(CombineArgs& args, int32_t tokens, Handle y, Handle out, Handle block) const;
  // Like `combine`, without a routing, of `rows` token-major rows.
  bool combine_rows(CombineArgs& args, int32_t tokens, int64_t rows, Handle y, Handle out) const;

  // For the DeepEP interface, whose calls name their geometry only in part.

  // Whether the columns of these tensors fit a dispatch of this geometry.
  bool suits(Handle x, Handle topk_idx) const;
  // Likewise of a dispatch of token-major rows, whose dtypes must fit, too.
  bool suits_token_rows(Handle x, Handle scales, Handle topk_idx) const;
  // Whether `y` and the tensors of a handle fit a combine of this geometry.
  bool suits_handle(Handle y, Handle source_tokens, Handle ranges, Handle topk_idx) const;

  // The outputs of a dispatch, which the library has allocated, so they need no check. If a tensor
  // cannot be read, these functions call its data_ptr().

  // Puts the outputs into `args`. `scales` may be None.
  void place(DispatchArgs& args, Handle rows, Handle scales, Handle counts, Handle block,
             bool weighted) const;
  // Likewise for a dispatch whose combine has late weights. `scales` and `row_weights` may be None.
  void place_late(DispatchArgs& args, Handle rows, Handle scales, Handle counts, Handle ranges,
                  Handle source_tokens, Handle row_weights) const;

 private:
  std::optional<TensorView> read(Handle object) const;
  // Puts the routing of a dispatch of so many tokens into `args`, or returns false.
  bool read_routing(DispatchArgs& args, int32_t tokens, Handle topk_idx, Handle topk_weights) const;
  bool has_columns(Handle object, int64_t columns) const;
  bool has_columns(Handle object, dlpack::DataType dtype, int64_t columns) const;
  void place_rows(DispatchArgs& args, Handle rows, Handle scales, Handle counts) const;
  // Whether the tensor is contiguous and has this dtype, this shape and the device of this fast
  // path.
  bool is_plain(const TensorView& view, dlpack::DataType dtype,
                std::initializer_list<int64_t> shape) const;
  // The address of the tensor if `is_plain`, else nothing. Empty tensors have a null address.
  std::optional<std::byte*> plain(Handle object, dlpack::DataType dtype,
                                  std::initializer_list<int64_t> shape) const;
  // The rows of a two-dimensional tensor, or kUndecided if they exceed max_tokens.
  int32_t tokens_of(const TensorView& view) const;
  std::byte* address_of(Handle output) const;

  std::optional<TensorReader> reader_;
  dlpack::Device device_{};
  LowLatencyGeometry geometry_;
  RoutingOffsets offsets_;
};

}  // namespace fanfold::bindings
