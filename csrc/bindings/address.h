// Pointer fields of argument structs, seen from Python as integer addresses (0 is null).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace fanfold::bindings {

template <typename Class, typename Struct, typename Pointee>
void def_address(Class& cls, const char* name, Pointee* Struct::* field) {
  cls.def_prop_rw(
      name, [field](const Struct& self) { return reinterpret_cast<uintptr_t>(self.*field); },
      [field](Struct& self, uintptr_t address) {
        self.*field = reinterpret_cast<Pointee*>(address);
      });
}

}  // namespace fanfold::bindings
