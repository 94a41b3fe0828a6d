// The fast path of low-latency calls without Python: reads the tensors of a call, returns whether
// the checks accept them, and fills in the kernels' arguments.
#pragma once

#include <cstdint>
#include <optional>

#include "bindings/tensor_reader.h"
#include "layout/low_latency_device.h"

namespace fanfold::bindings {

// Where the parts of a routing's block begin, in bytes; the ranges come first.
struct RoutingOffsets {
  int64_t table;
  int64_t source_tokens;
  int64_t row_weights;
};

class FastPath {
 public:
  using Handle = nanobind::handle;
  static constexpr int32_t kUndecided = -1;

  // For tensors of `like`'s class on `like`'s device; nothing where those cannot be read.
  static std::optional<FastPath> of(Handle like, const LowLatencyGeometry& geometry,
                                    const RoutingOffsets& offsets);

  // What a call is given. If it passes it is in `args` afterwards; else they are as they were.

  // The tokens of a dispatch, or kUndecided. `topk_weights` may be None.
  int32_t dispatch(DispatchArgs& args, Handle x, Handle topk_idx, Handle topk_weights) const;
  // The tokens of a combine that brings its weights, or kUndecided.
  int32_t late(CombineArgs& args, Handle ranges, Handle topk_idx, Handle topk_weights) const;
  // Whether these will do for a combine of `tokens`. `block` is the routing's, if it has one.
  bool combine(CombineArgs& args, int32_t tokens, Handle y, Handle out, Handle block) const;

  // The DeepEP face, whose calls name their geometry only in part.

  // Whether a dispatch of these has this geometry, as far as their columns tell.
  bool suits(Handle x, Handle topk_idx) const;
  // Whether a combine of `y` may have the tensors of this handle, which has this geometry.
  bool suits_handle(Handle y, Handle source_tokens, Handle ranges, Handle topk_idx) const;

  // Where the outputs of a dispatch lie. They are right; what cannot be read is asked in Python.

  // `scales` may be None.
  void place(DispatchArgs& args, Handle rows, Handle scales, Handle counts, Handle block,
             bool weighted) const;
  // `scales` and `row_weights` may be None.
  void place_late(DispatchArgs& args, Handle rows, Handle scales, Handle counts, Handle ranges,
                  Handle source_tokens, Handle row_weights) const;

 private:
  FastPath(const TensorReader& reader, dlpack::Device device, const LowLatencyGeometry& geometry,
           const RoutingOffsets& offsets)
      : reader_(reader), device_(device), geometry_(geometry), offsets_(offsets) {}

  bool has_columns(Handle object, int32_t columns) const;
  void place_rows(DispatchArgs& args, Handle rows, Handle scales, Handle counts) const;
  // Whether it is contiguous, with this dtype and shape, on the right device.
  bool is_plain(const TensorView& view, dlpack::DataType dtype,
                std::initializer_list<int64_t> shape) const;
  // The address of a tensor that is; empty ones are at null.
  std::optional<std::byte*> plain(Handle object, dlpack::DataType dtype,
                                  std::initializer_list<int64_t> shape) const;
  // The rows of what may describe a rank's own tokens, or kUndecided.
  int32_t tokens_of(const TensorView& view) const;
  std::byte* address_of(Handle output) const;

  TensorReader reader_;
  dlpack::Device device_;
  LowLatencyGeometry geometry_;
  RoutingOffsets offsets_;
};

}  // namespace fanfold::bindings
