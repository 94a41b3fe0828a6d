// Reads the address, shape, strides, dtype and device of a torch.Tensor without running Python,
// through DLPack's C exchange API (PyTorch 2.10 and later).
//
// The reader does not use the API's allocator, because its tensors cannot be recorded on streams.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>

namespace fanfold::bindings {

// The part of the C ABI of DLPack 1.3 (its dlpack.h) that the reader uses. It is the same for every
// 1.x.
namespace dlpack {

inline constexpr uint32_t kMajorVersion = 1;

struct Device {
  int32_t kind;
  int32_t index;

  bool operator==(const Device&) const = default;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;

  bool operator==(const DataType&) const = default;
};

inline constexpr DataType kInt32{0, 32, 1};
inline constexpr DataType kInt64{0, 64, 1};
inline constexpr DataType kFloat32{2, 32, 1};
inline constexpr DataType kBfloat16{4, 16, 1};
inline constexpr DataType kFloat8E4m3fn{10, 8, 1};

struct Tensor {
  std::byte* data;
  Device device;
  int32_t dimensions;
  DataType dtype;
  const int64_t* shape;
  const int64_t* strides;  // in elements
  uint64_t byte_offset;
};
static_assert(sizeof(Device) == 8);
static_assert(sizeof(DataType) == 4);
static_assert(sizeof(Tensor) == 48);
static_assert(offsetof(Tensor, device) == 8);
static_assert(offsetof(Tensor, dimensions) == 16);
static_assert(offsetof(Tensor, dtype) == 20);
static_assert(offsetof(Tensor, shape) == 24);
static_assert(offsetof(Tensor, byte_offset) == 40);

// Returns 0, or -1 with a Python exception set. `object` owns the memory behind `tensor`.
using TensorFromObject = int (*)(void* object, Tensor* tensor);

struct ExchangeApiHeader {
  uint32_t major;
  uint32_t minor;
  const ExchangeApiHeader* older;  // of an older major version, or null
};

struct ExchangeApi {
  ExchangeApiHeader header;
  void (*owning[3])();                  // the functions that make, export and import owned tensors
  TensorFromObject tensor_from_object;  // or null
  void (*current_stream)();
};
static_assert(sizeof(ExchangeApiHeader) == 16);
static_assert(sizeof(ExchangeApi) == 56);
static_assert(offsetof(ExchangeApi, tensor_from_object) == 40);

}  // namespace dlpack

// The properties of one tensor; valid while the tensor lives and no code resizes it.
struct TensorView {
  dlpack::Tensor tensor;

  std::byte* address() const { return tensor.data + tensor.byte_offset; }
  bool has_shape(std::initializer_list<int64_t> shape) const;
  // Whether the tensor is in row-major order without gaps. As in PyTorch, strides of dimensions of
  // size 1, and all strides of an empty tensor, may have any value.
  bool is_contiguous() const;
};

// Reads tensors of exactly one class.
class TensorReader {
 public:
  // Makes a reader for the class `type`; returns nothing if the class does not have the API.
  static std::optional<TensorReader> of(nanobind::handle type);

  // Returns nothing for an object of another class, including derived classes, and for a tensor
  // that DLPack cannot describe (for example on the device "meta"). Leaves no Python exception set.
  std::optional<TensorView> read(nanobind::handle object) const;

 private:
  TensorReader(PyTypeObject* type, dlpack::TensorFromObject from) : type_(type), read_(from) {}

  PyTypeObject* type_;  // only compared
  dlpack::TensorFromObject read_;
};

}  // namespace fanfold::bindings
