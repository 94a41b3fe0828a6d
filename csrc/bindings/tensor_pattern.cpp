#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "bindings/bindings.h"
#include "bindings/tensor_reader.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

constexpr int kMostDimensions = 4;

// What a tensor that was checked once looks like. Others of the same class, dtype, device, shape
// and strides, whose address is a multiple of as many bytes, would pass the same checks.
class TensorPattern {
 public:
  TensorPattern(nb::handle like, int64_t alignment)
      : reader_(TensorReader::of(like.type())), alignment_(static_cast<uintptr_t>(alignment)) {
    const auto view = reader_ ? reader_->read(like) : std::nullopt;
    if (!view || view->tensor.dimensions > kMostDimensions) {
      reader_.reset();
      return;
    }
    device_ = view->tensor.device;
    dtype_ = view->tensor.dtype;
    dimensions_ = view->tensor.dimensions;
    std::copy_n(view->tensor.shape, dimensions_, shape_.begin());
    std::copy_n(view->tensor.strides, dimensions_, strides_.begin());
    bytes_ = bytes_of(view->tensor);
  }

  // From the first element to behind the last, whatever the strides; 0 of what has no pattern.
  int64_t bytes() const { return bytes_; }

  // Where the tensor's data begins if it looks the same, else 0, which is never wrong to return:
  // the caller then makes all checks.
  uintptr_t address(nb::handle object) const {
    const auto view = reader_ ? reader_->read(object) : std::nullopt;
    if (!view) return 0;
    const dlpack::Tensor& tensor = view->tensor;
    const bool same = tensor.dimensions == dimensions_ && tensor.dtype == dtype_ &&
                      tensor.device == device_ &&
                      std::equal(tensor.shape, tensor.shape + dimensions_, shape_.begin()) &&
                      std::equal(tensor.strides, tensor.strides + dimensions_, strides_.begin());
    const auto address = reinterpret_cast<uintptr_t>(view->address());
    return same && address % alignment_ == 0 ? address : 0;
  }

 private:
  static int64_t bytes_of(const dlpack::Tensor& tensor) {
    int64_t last = 0;
    for (int32_t at = 0; at < tensor.dimensions; ++at) {
      if (tensor.shape[at] == 0) return 0;
      last += (tensor.shape[at] - 1) * tensor.strides[at];
    }
    return (last + 1) * tensor.dtype.bits * tensor.dtype.lanes / 8;
  }

  std::optional<TensorReader> reader_;
  uintptr_t alignment_;
  dlpack::Device device_{};
  dlpack::DataType dtype_{};
  int32_t dimensions_ = 0;
  int64_t bytes_ = 0;
  std::array<int64_t, kMostDimensions> shape_{};
  std::array<int64_t, kMostDimensions> strides_{};
};

}  // namespace

void bind_tensor_pattern(nb::module_& module) {
  nb::class_<TensorPattern>(module, "TensorPattern")
      .def(
          "__init__",
          [](TensorPattern* self, nb::handle like, int64_t alignment) {
            new (self) TensorPattern(like, alignment);
          },
          "like"_a.none(), "alignment"_a)
      .def("address", &TensorPattern::address, "tensor"_a.none())
      .def_prop_ro("bytes", &TensorPattern::bytes);
}

}  // namespace fanfold::bindings
