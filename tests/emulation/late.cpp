#include "late.hpp"

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ctas.hpp"
#include "tensor_map.hpp"

namespace emulation {
namespace {

// Of each thread of a CTA, which is a thread of the operating system.
template <class T>
T& own() {
  static thread_local std::map<unsigned, T> of_threads;
  return of_threads[thread().x];
}

template <class T>
struct Late {
  std::vector<T> open;
  std::deque<std::vector<T>> groups;

  void commit() { groups.push_back(std::exchange(open, {})); }

  template <class Do>
  void finish(size_t youngest, const Do& finish_one) {
    for (; groups.size() > youngest; groups.pop_front())
      for (const T& each : groups.front()) finish_one(each);
  }
};

}  // namespace

// ---- copies of 16 bytes to shared memory --------------------------------------------------------

namespace {

constexpr size_t kCopyBytes = 16;

struct Copy {
  void* to;
  const void* from;
};
Late<Copy>& copies() { return own<Late<Copy>>(); }

}  // namespace

void copy_late(void* to, const void* from) { copies().open.push_back({to, from}); }
void commit_copies() { copies().commit(); }
void await_copies(size_t youngest) {
  copies().finish(youngest, [](const Copy& copy) {
    copy.from != nullptr ? std::memcpy(copy.to, copy.from, kCopyBytes)
                         : std::memset(copy.to, 0, kCopyBytes);
  });
}

// ---- bulk stores --------------------------------------------------------------------------------

namespace {

struct Store {
  std::function<void()> read, write;
};

struct Stores {
  std::vector<Store> open;
  std::deque<std::vector<Store>> unread, unwritten;  // groups

  void read_all_but(size_t youngest) {
    for (; unread.size() > youngest; unread.pop_front()) {
      for (const Store& store : unread.front()) store.read();
      unwritten.push_back(std::move(unread.front()));
    }
  }
  void write_all_but(size_t youngest) {
    read_all_but(youngest);
    for (; unread.size() + unwritten.size() > youngest; unwritten.pop_front())
      for (const Store& store : unwritten.front()) store.write();
  }
};

}  // namespace

void store_late(void* global, const void* shared, size_t bytes) {
  const auto read = std::make_shared<std::vector<unsigned char>>(bytes);
  own<Stores>().open.push_back({[=] { std::memcpy(read->data(), shared, bytes); },
                                [=] { std::memcpy(global, read->data(), bytes); }});
}
void commit_stores() {
  Stores& stores = own<Stores>();
  stores.unread.push_back(std::exchange(stores.open, {}));
}
void await_read(size_t youngest) { own<Stores>().read_all_but(youngest); }
void await_written(size_t youngest) { own<Stores>().write_all_but(youngest); }

// ---- boxes of tensors ---------------------------------------------------------------------------

namespace {

// A box in global memory and in shared memory, row by row.
class BoxPlaces {
 public:
  BoxPlaces(const fanfold::TensorMap* map, Box at, uint32_t shared)
      : map_(TensorMap::of(map)), at_(at), shared_(shared) {
    if (shared_ % (map_.swizzles ? 1024 : 128) != 0) std::abort();
  }

  int64_t bytes() const { return map_.box[1] * row_bytes(); }

  // `move(place, at)` for each byte of the box: its place in shared memory, and where it is in global
  // memory, null outside of the tensor.
  template <class Move>
  void for_each_byte(const Move& move) const {
    for (int64_t y = 0; y < map_.box[1]; ++y)
      for (int64_t x = 0; x < row_bytes(); ++x) move(place(y * row_bytes() + x), global(x, y));
  }

 private:
  int64_t row_bytes() const { return map_.box[0] * map_.element_bytes; }

  uint32_t place(int64_t byte) const {
    const uint32_t linear = shared_ + static_cast<uint32_t>(byte);
    return map_.swizzles ? linear ^ (linear >> 7 & 7u) << 4 : linear;
  }
  unsigned char* global(int64_t x, int64_t y) const {
    const int64_t column = at_.x * map_.element_bytes + x;
    const int64_t row = at_.y + y;
    const bool inside = 0 <= column && column < map_.sizes[0] * map_.element_bytes && 0 <= row &&
                        row < map_.sizes[1] && 0 <= at_.z && at_.z < map_.sizes[2];
    if (!inside) return nullptr;
    return map_.address + column + row * map_.strides[0] + at_.z * map_.strides[1];
  }

  const TensorMap map_;
  const Box at_;
  const uint32_t shared_;
};

}  // namespace

uint32_t load_box(unsigned char* memory, uint32_t to, const fanfold::TensorMap* map, Box at) {
  const BoxPlaces box(map, at, to);
  box.for_each_byte([&](uint32_t place, const unsigned char* from) {
    memory[place] = from != nullptr ? *from : 0;
  });
  return static_cast<uint32_t>(box.bytes());
}

void store_box_late(const fanfold::TensorMap* map, Box at, const unsigned char* memory,
                    uint32_t from) {
  const BoxPlaces box(map, at, from);
  const auto bytes = std::make_shared<std::vector<unsigned char>>();
  const auto read = [=] {
    box.for_each_byte([&](uint32_t place, unsigned char*) { bytes->push_back(memory[place]); });
  };
  const auto write = [=] {
    size_t next = 0;
    box.for_each_byte([&](uint32_t, unsigned char* to) {
      if (to != nullptr) *to = (*bytes)[next];
      ++next;
    });
  };
  own<Stores>().open.push_back({read, write});
}

// ---- products of tensor cores -------------------------------------------------------------------

namespace {

constexpr int kDepth = 32;
constexpr int kThreads = 128;
constexpr int kMostColumns = 64;  // of a thread

double e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  if ((code & 127) == 127) return std::nan("");
  const double magnitude =
      std::ldexp(exponent == 0 ? mantissa : 8 + mantissa, std::max(exponent, 1) - 10);
  return code & 128 ? -magnitude : magnitude;
}

// 32 elements of K of one row of a tile: every `stride`-th of `row`.
void decode_row(double* row, int stride, const unsigned char* memory, uint64_t descriptor,
                int number) {
  static const std::vector<double> values = [] {
    std::vector<double> every;
    for (int code = 0; code < 256; ++code) every.push_back(e4m3_value(static_cast<uint8_t>(code)));
    return every;
  }();
  if (descriptor >> 62 != 1) std::abort();
  const auto begin = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const auto eight_rows = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  const auto at = static_cast<uint32_t>(number);
  const uint32_t linear = begin + at / 8 * eight_rows + at % 8 * 128;
  const double* of_code = values.data();
  for (uint32_t unit = linear; unit < linear + kDepth; unit += 16) {
    const unsigned char* from = memory + (unit ^ (unit >> 7 & 7u) << 4);
    for (int k = 0; k < 16; ++k, row += stride) *row = of_code[from[k]];
  }
}

// A sum is exact, and then rounded once.
void multiply(const Product& product, const unsigned char* memory) {
  const int number = static_cast<int>(thread().x) % kThreads;
  const int columns = product.count / 2;
  float* d = product.d;
  double b_values[kDepth][kMostColumns];
  for (int c = 0; c < columns; ++c)
    decode_row(&b_values[0][c], kMostColumns, memory, product.b,
               c / 2 * 8 + number % 4 * 2 + c % 2);
  for (int h = 0; h < 2; ++h) {
    double a_values[kDepth];
    decode_row(a_values, 1, memory, product.a, number / 32 * 16 + number / 4 % 8 + 8 * h);
    double sums[kMostColumns];
    for (int c = 0; c < columns; ++c) sums[c] = product.adds ? d[c / 2 * 4 + 2 * h + c % 2] : 0.0;
    for (int k = 0; k < kDepth; ++k)
      for (int c = 0; c < columns; ++c) sums[c] += a_values[k] * b_values[k][c];
    for (int c = 0; c < columns; ++c) d[c / 2 * 4 + 2 * h + c % 2] = static_cast<float>(sums[c]);
  }
}

// In the order of the threads' own waits.
Late<Product>& products() { return own<Late<Product>>(); }

}  // namespace

void multiply_late(const Product& product) { products().open.push_back(product); }
void commit_products() { products().commit(); }
void await_products(size_t youngest, const unsigned char* memory) {
  products().finish(youngest, [=](const Product& product) { multiply(product, memory); });
}

}  // namespace emulation
