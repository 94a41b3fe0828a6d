// A kernel compiled for one architecture, loaded into the CUDA context that is current.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "cuda/driver.h"
#include "layout/protocol.h"

namespace fanfold::cuda {

// How kernels find the memory of `ranks` ranks at `peers`: in their arguments, or where those are
// too many at `copy` in device memory.
PeerTable peer_table(const uintptr_t* peers, int32_t ranks, uintptr_t copy);

struct LaunchShape {
  int ctas;              // of a one-dimensional grid
  int threads;           // per CTA
  int shared_bytes = 0;  // dynamic; above 48 KiB less the static ones see allow_shared_bytes
  uintptr_t stream = 0;  // CUstream; 0 is the legacy default stream
  // The kernel may start before the one ahead of it in the stream has ended, and itself waits for
  // it (programmatic dependent launch, compute capability 9.0 and later).
  bool early = false;
};

// Everything but the destructor throws DriverFailure for what the driver refuses, and expects the
// context that was current at construction. Not to be shared by threads without a lock; `launch`
// alone may be called by several at once.
class Kernel {
 public:
  // Loads `cubin`, whose function `symbol` takes exactly one parameter, a struct by value; errors
  // call it `entry`. The function is on the device when this returns: nothing is left to be loaded
  // by the first launch, where loading would wait for kernels that themselves wait for this one.
  Kernel(std::span<const std::byte> cubin, std::string entry, const std::string& symbol);
  // Every launch must have ended. Never throws; after the end of the context, or of the driver at
  // exit, it does nothing, as the module has gone with it.
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  Kernel(Kernel&&) = delete;
  Kernel& operator=(Kernel&&) = delete;

  const std::string& entry() const { return entry_; }
  int registers() const { return registers_; }
  // Per thread: the stack and what was spilt.
  int local_bytes() const { return local_bytes_; }
  int static_shared_bytes() const { return static_shared_bytes_; }

  // Allows launches up to `bytes` of dynamic shared memory.
  void allow_shared_bytes(int bytes);

  // Enqueues the kernel with the `bytes` at `arguments` as its parameter, which are copied before
  // this returns. Throws BadArgument if the kernel's parameter has another size (which drivers
  // before CUDA 12.4 cannot tell).
  void launch(const void* arguments, size_t bytes, const LaunchShape& shape) const;

 private:
  int attribute(FunctionAttribute attribute) const;
  void find_function(const std::string& symbol);
  void find_parameter();
  void unload() noexcept;

  const Driver& driver_;
  std::string entry_;
  Context context_ = nullptr;
  Module module_ = nullptr;
  Function function_ = nullptr;
  size_t parameter_bytes_ = 0;  // 0: not known
  int registers_ = 0;
  int local_bytes_ = 0;
  int static_shared_bytes_ = 0;
};

}  // namespace fanfold::cuda
