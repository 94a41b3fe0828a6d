// GPU memory, through host memory and the CUDA driver.
//
// libcuda.so.1 is loaded at the first registration of GPU memory. Every copy runs on a stream of
// the plugin in a context of its own on the memory's device, and the call returns when the copy is
// done: a signal that follows finds its payload in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "nccl_plugin/memory.h"

namespace fanfold::nccl_plugin {

// The driver's functions that the plugin calls; a test passes its own. 0 is success.
struct Driver {
  int (*init)(unsigned flags);
  int (*pointer_attribute)(void* value, int attribute, uintptr_t address);
  int (*create_context)(void** context, unsigned flags, int device);
  int (*destroy_context)(void* context);
  int (*push_context)(void* context);
  int (*pop_context)(void** context);
  int (*exchange_capture_mode)(int* mode);
  int (*create_stream)(void** stream, unsigned flags);
  int (*destroy_stream)(void* stream);
  int (*synchronize)(void* stream);
  int (*to_device)(uintptr_t to, const void* from, size_t bytes, void* stream);
  int (*to_host)(void* to, uintptr_t from, size_t bytes, void* stream);
  int (*write_word)(void* stream, uintptr_t to, uint64_t value, unsigned flags);
  int (*error_name)(int error, const char** name);
};

// Loads the driver once; null with a problem if there is none.
const Driver* load_driver(Problem& problem);

// Memory of the GPU that owns the address `data`. Null with a problem if the driver refuses.
std::shared_ptr<Memory> gpu_memory(const Driver& driver, void* data, uint64_t bytes,
                                   Problem& problem);

}  // namespace fanfold::nccl_plugin
