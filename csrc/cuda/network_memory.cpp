#include "cuda/network_memory.h"

#include <string>

#include "cuda/driver.h"

namespace fanfold::cuda {
namespace {

// What a NIC writes must be seen by the GPU whose memory it is, once the CPU knows that it has been
// written (CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER).
constexpr int kOrderedForOwner = 100;
constexpr int kDmabuf = 1;  // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

int value_of(DeviceAttribute attribute, int32_t device) {
  int value = 0;
  driver().check(driver().device_get_attribute(&value, attribute, device), "cuDeviceGetAttribute",
                 "attribute " + std::to_string(static_cast<int>(attribute)) + " of GPU " +
                     std::to_string(device));
  return value;
}

}  // namespace

std::string_view why_no_network_memory(int32_t device) {
  const bool known = value_of(DeviceAttribute::GPU_DIRECT_RDMA_SUPPORTED, device) != 0 ||
                     value_of(DeviceAttribute::DMABUF_SUPPORTED, device) != 0;
  if (!known) return "the driver lets no NIC reach this GPU's memory";
  if (value_of(DeviceAttribute::GPU_DIRECT_RDMA_WRITES_ORDERING, device) < kOrderedForOwner) {
    return "this GPU does not see what NICs write in order";
  }
  return {};
}

int make_dmabuf(uintptr_t address, int64_t bytes) {
  int descriptor = -1;
  const Result result = driver().mem_get_handle_for_address_range(
      &descriptor, address, static_cast<size_t>(bytes), kDmabuf, 0);
  return result == 0 ? descriptor : -1;
}

}  // namespace fanfold::cuda
