// A queue of bounded size.
#pragma once

#include <cstddef>
#include <vector>

namespace fanfold::proxy {

template <typename T>
class Queue {
 public:
  explicit Queue(size_t capacity) : places_(capacity) {}

  bool empty() const { return size_ == 0; }
  bool full() const { return size_ == places_.size(); }
  size_t size() const { return size_; }

  // The queue must not be full.
  void push(const T& value) { places_[(first_ + size_++) % places_.size()] = value; }
  // The queue must not be empty.
  T& front() { return places_[first_]; }
  T& back() { return places_[(first_ + size_ - 1) % places_.size()]; }
  void pop() {
    first_ = (first_ + 1) % places_.size();
    --size_;
  }

 private:
  std::vector<T> places_;
  size_t first_ = 0;
  size_t size_ = 0;
};

}  // namespace fanfold::proxy
