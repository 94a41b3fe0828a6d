// A kernel compiled for one architecture and loaded into the current CUDA context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "cuda/driver.h"
#include "layout/protocol.h"

namespace fanfold::cuda {

// The kernels' table of the memory of `ranks` ranks, at the addresses `peers`. The table itself
// holds the addresses of few ranks; for more ranks it points to `copy`, their addresses in device
// memory.
PeerTable peer_table(const uintptr_t* peers, int32_t ranks, uintptr_t copy);

struct LaunchShape {
  int ctas;              // of a one-dimensional grid
  int threads;           // per CTA
  int shared_bytes = 0;  // dynamic; above 48 KiB less the static bytes, call allow_shared_bytes
  uintptr_t stream = 0;  // CUstream; 0 is the legacy default stream
  // The kernel may start before the previous kernel of the stream has ended; it waits for that
  // kernel itself (programmatic dependent launch, compute capability 9.0 and later).
  bool early = false;
  int cluster = 1;  // CTAs of a cluster; divides `ctas`
};

// All functions but the destructor throw DriverFailure if a driver call fails. All but `launch` and
// the destructor need the context that was current at construction. Several threads may call
// `launch` at once; all other functions need a lock.
class Kernel {
 public:
  // Loads `cubin`, whose function `symbol` takes exactly one parameter, a struct by value; errors
  // name it `entry`. Loads the function onto the device at once: if the first launch did it,
  // loading would wait for running kernels that themselves wait for this one.
  Kernel(std::span<const std::byte> cubin, std::string entry, const std::string& symbol);
  // Every launch must have ended. Never throws. Does nothing after the end of the context, or of
  // the driver at exit, because the module has ended with it.
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  Kernel(Kernel&&) = delete;
  Kernel& operator=(Kernel&&) = delete;

  const std::string& entry() const { return entry_; }
  int registers() const { return registers_; }
  // Local memory per thread: the stack and spilled registers.
  int local_bytes() const { return local_bytes_; }
  int static_shared_bytes() const { return static_shared_bytes_; }

  // Allows launches up to `bytes` of dynamic shared memory.
  void allow_shared_bytes(int bytes);

  // How many clusters of `shape` an idle GPU runs at the same time; `shape.ctas` is not looked at.
  int most_clusters(const LaunchShape& shape) const;

  // Enqueues the kernel with the `bytes` bytes at `arguments` as its parameter, and copies them
  // before it returns. Throws BadArgument if the kernel's parameter has another size; drivers
  // before CUDA 12.4 do not report the size.
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
  size_t parameter_bytes_ = 0;  // 0 if unknown
  int registers_ = 0;
  int local_bytes_ = 0;
  int static_shared_bytes_ = 0;
};

}  // namespace fanfold::cuda
