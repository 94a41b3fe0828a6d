// Copies of rows to where the caller will read them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fanfold {

// Copies the rows of one result of `bytes` in all, on a host where each of `ranks` does the same.
//
// A result that outgrows the caches is written past them: an ordinary store would first read each
// line that it writes, and drive out what is read next. Whatever was copied is in place for other
// threads once this object is gone.
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
