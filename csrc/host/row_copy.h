// Copies received rows to the caller's memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fanfold {

// Copies the rows of one result of `bytes` in all, on a host where each of `ranks` does the same.
//
// If the results exceed the caches, copies with non-temporal stores: an ordinary store would first
// read each line that it writes, and evict lines that are read next. Other threads see the copied
// rows after the destructor of this object.
class RowCopy {
 public:
  RowCopy(int64_t bytes, int32_t ranks);
  RowCopy(const RowCopy&) = delete;
  RowCopy& operator=(const RowCopy&) = delete;
  ~RowCopy();

  void operator()(std::byte* to, const std::byte* from, int64_t bytes) const;

 private:
  bool past_caches_;
};

}  // namespace fanfold
