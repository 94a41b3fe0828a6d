// Binds the fields of argument structs that hold arrays or addresses.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "base/array.h"

namespace fanfold::bindings {

// Memory as Python passes it: an address and a number of bytes, from fanfold/lending.py.
using Lent = std::optional<std::pair<uintptr_t, int64_t>>;

// The array of whole elements that fit the bytes. Throws BadArgument for a misaligned address.
template <typename T>
Array<T> array_of(const Lent& lent, const char* name) {
  if (!lent) return {};
  const auto [address, bytes] = *lent;
  if (address % alignof(T) != 0) {
    throw BadArgument(name, "at address " + std::to_string(address),
                      "a multiple of " + std::to_string(alignof(T)) + " bytes");
  }
  return {reinterpret_cast<T*>(address), bytes / static_cast<int64_t>(sizeof(T))};
}

// Binds an array of host memory; None is null.
template <typename Class, typename Struct, typename Element>
void def_array(Class& cls, const char* name, Array<Element> Struct::* field) {
  cls.def_prop_rw(
      name,
      [field](const Struct& self) -> Lent {
        const Array<Element>& array = self.*field;
        if (array == nullptr) return std::nullopt;
        const int64_t bytes = array.size() * static_cast<int64_t>(sizeof(Element));
        return std::pair(reinterpret_cast<uintptr_t>(static_cast<Element*>(array)), bytes);
      },
      [field, name](Struct& self, const Lent& lent) {
        self.*field = array_of<Element>(lent, name);
      },
      nanobind::for_setter(nanobind::arg("lent").none()));
}

// Binds an address on a GPU as an integer; 0 is null.
template <typename Class, typename Struct, typename Pointee>
void def_address(Class& cls, const char* name, Pointee* Struct::* field) {
  cls.def_prop_rw(
      name, [field](const Struct& self) { return reinterpret_cast<uintptr_t>(self.*field); },
      [field](Struct& self, uintptr_t address) {
        self.*field = reinterpret_cast<Pointee*>(address);
      });
}

}  // namespace fanfold::bindings
