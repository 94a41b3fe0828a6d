// What a torch.Tensor is (address, shape, strides, dtype, device), read without running Python, by
// DLPack's C exchange API, which PyTorch has from 2.10 on.
//
// Nothing else of that API is used: tensors that its allocator makes cannot be recorded on streams.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>

namespace fanfold::bindings {

// The C ABI of DLPack 1.3 (its dlpack.h), as far as it is used here. Every 1.x has the same.
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

// 0, or -1 with a Python exception set. `object` keeps what `tensor` points to.
using TensorFromObject = int (*)(void* object, Tensor* tensor);

struct ExchangeApiHeader {
  uint32_t major;
  uint32_t minor;
  const ExchangeApiHeader* older;  // of another major version, or null
};

struct ExchangeApi {
  ExchangeApiHeader header;
  void (*owning[3])();                  // what makes, exports and imports tensors that are owned
  TensorFromObject tensor_from_object;  // or null
  void (*current_stream)();
};
static_assert(sizeof(ExchangeApiHeader) == 16);
static_assert(sizeof(ExchangeApi) == 56);
static_assert(offsetof(ExchangeApi, tensor_from_object) == 40);

}  // namespace dlpack

// One tensor, as it is now; valid while the tensor lives and nobody resizes it.
struct TensorView {
  dlpack::Tensor tensor;

  std::byte* address() const { return tensor.data + tensor.byte_offset; }
  bool has_shape(std::initializer_list<int64_t> shape) const;
  // In row-major order without gaps; as PyTorch has it, strides of no consequence may be anything.
  bool is_contiguous() const;
};

// Reads tensors whose type is exactly one class.
class TensorReader {
 public:
  // Of the class `type`; nothing if it has no such API.
  static std::optional<TensorReader> of(nanobind::handle type);

  // Nothing for an object of another class, also of one derived from it, and for a tensor that
  // DLPack has no words for (on the device "meta", for example). Leaves no Python exception behind.
  std::optional<TensorView> read(nanobind::handle object) const;

 private:
  TensorReader(PyTypeObject* type, dlpack::TensorFromObject read) : type_(type), read_(read) {}

  PyTypeObject* type_;  // only compared
  dlpack::TensorFromObject read_;
};

}  // namespace fanfold::bindings
