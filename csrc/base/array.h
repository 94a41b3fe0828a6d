// Memory that a caller lends to the core for the length of one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace fanfold {

// A pointer with its number of elements. A call checks the number once, before it reads or writes
// any element; afterwards it uses the array as a pointer. Null if the caller lends nothing.
template <typename T>
class Array {
 public:
  constexpr Array() = default;
  constexpr Array(std::nullptr_t) {}
  constexpr Array(T* data, int64_t size) : data_(data), size_(size) {}
  Array(std::vector<std::remove_const_t<T>>& values)
      : Array(values.data(), static_cast<int64_t>(values.size())) {}
  Array(const std::vector<std::remove_const_t<T>>& values)
    requires std::is_const_v<T>
      : Array(values.data(), static_cast<int64_t>(values.size())) {}
  // A writable array converts to a read-only one.
  template <typename U>
    requires(std::is_const_v<T> && std::is_same_v<U, std::remove_const_t<T>>)
  constexpr Array(const Array<U>& values) : Array(values.data(), values.size()) {}

  constexpr operator T*() const { return data_; }
  constexpr T* data() const { return data_; }
  constexpr int64_t size() const { return size_; }

  // Throws BadArgument unless at least `count` elements are lent.
  void require(const char* name, int64_t count) const {
    if (size_ >= count) return;
    throw BadArgument(name, std::to_string(size_) + " elements",
                      "at least " + std::to_string(count) + " elements for this call");
  }
  // Like `require`, for an array that the caller may leave out.
  void require_if_lent(const char* name, int64_t count) const {
    if (data_ != nullptr) require(name, count);
  }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

// The shape and the strides of a two-dimensional array. Strides and `extent()`, the distance from
// the first element to behind the last one, count elements.
struct Strided {
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int64_t column_stride;

  int64_t extent() const {
    if (rows == 0 || columns == 0) return 0;
    return (rows - 1) * row_stride + (columns - 1) * column_stride + 1;
  }
};

}  // namespace fanfold
