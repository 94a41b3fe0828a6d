// How a transport over libfabric names itself to its peers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace fanfold::transport::libfabric {

inline constexpr size_t kMostNameBytes = 128;
// Changes with the layout of an address.
inline constexpr uint64_t kAddressMagic = 0x31666f6c666e6166;

// The first part of an address. All its parts have a fixed size, so that ranks can gather them.
struct AddressHead {
  uint64_t magic;
  std::array<char, 32> provider;
  uint32_t addr_format;
  int32_t rails;
};

struct AddressRail {
  uint64_t name_bytes;
  std::array<std::byte, kMostNameBytes> name;
  // Where writes without bytes point, because providers check the key of those, too.
  uint64_t landing;
  uint64_t landing_key;
};
static_assert(std::is_trivially_copyable_v<AddressHead> && sizeof(AddressHead) == 48);
static_assert(std::is_trivially_copyable_v<AddressRail>);

}  // namespace fanfold::transport::libfabric
