#include "bindings/tensor_reader.h"

namespace nb = nanobind;

namespace fanfold::bindings {
namespace {

constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsule = "dlpack_exchange_api";

// The API of the version that this file implements, or null if the producer has no such version.
const dlpack::ExchangeApi* known_api(const void* newest) {
  const auto* header = static_cast<const dlpack::ExchangeApiHeader*>(newest);
  while (header != nullptr && header->major > dlpack::kMajorVersion) header = header->older;
  if (header == nullptr || header->major != dlpack::kMajorVersion) return nullptr;
  return reinterpret_cast<const dlpack::ExchangeApi*>(header);
}

}  // namespace

bool TensorView::has_shape(std::initializer_list<int64_t> shape) const {
  if (static_cast<size_t>(tensor.dimensions) != shape.size()) return false;
  const int64_t* actual = tensor.shape;
  for (const int64_t size : shape) {
    if (*actual++ != size) return false;
  }
  return true;
}

bool TensorView::is_contiguous() const {
  int64_t step = 1;
  bool in_order = true;
  for (int place = tensor.dimensions - 1; place >= 0; --place) {
    const int64_t size = tensor.shape[place];
    if (size == 0) return true;
    if (size == 1) continue;
    in_order = in_order && tensor.strides[place] == step;
    step *= size;
  }
  return in_order;
}

std::optional<TensorReader> TensorReader::of(nb::handle type) {
  if (PyType_Check(type.ptr()) == 0) return std::nullopt;
  const nb::object capsule = nb::getattr(type, kAttribute, nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), kCapsule) == 0) return std::nullopt;
  // The table outlives the capsule: the specification keeps it until the process ends.
  const auto* api = known_api(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
  if (api == nullptr || api->tensor_from_object == nullptr) return std::nullopt;
  return TensorReader(reinterpret_cast<PyTypeObject*>(type.ptr()), api->tensor_from_object);
}

std::optional<TensorView> TensorReader::read(nb::handle object) const {
  TensorView view;
  if (Py_TYPE(object.ptr()) != type_) return std::nullopt;
  if (read_(object.ptr(), &view.tensor) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const bool described = view.tensor.shape != nullptr && view.tensor.strides != nullptr;
  if (view.tensor.dimensions != 0 && !described) return std::nullopt;
  return view;
}

}  // namespace fanfold::bindings
