// One rank's shared memory: created by its owner, mapped by its peers.
//
// The memory has no name in any file system (memfd), so nothing can be left behind by any kind of
// death, and the size of /dev/shm does not bound it. Peers open it through the owner's descriptor
// in /proc, which the kernel allows to processes of the same user in the same PID namespace.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fanfold {

class Region {
 public:
  Region() = default;
  ~Region() { unmap(); }
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Zeroed memory of `bytes`, readable and writable by this user only (mode 0600).
  static Region create(int64_t bytes);
  // The memory that process `pid` holds under `descriptor`.
  static Region open(pid_t pid, int descriptor, int64_t bytes);
  // This mapping once more, for another user in the same process.
  Region share() const;

  std::byte* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }

  // Once every peer has mapped the region its descriptor has no further use.
  void close_descriptor();
  void unmap();

 private:
  Region(int descriptor, int64_t bytes);

  std::shared_ptr<std::byte> data_;  // unmapped with the last of those that share it
  int64_t bytes_ = 0;
  int descriptor_ = -1;
};

// A handle on what runs a rank: reports whether it has ended. That is a process, which counts as
// ended also when nobody has reaped it yet, or a thread of this process.
class RankHandle {
 public:
  RankHandle() = default;
  // If `pid` is this process, the rank is its thread `thread`, where 0 stands for none that ends
  // before the process does.
  explicit RankHandle(pid_t pid, pid_t thread = 0);
  ~RankHandle();
  RankHandle(RankHandle&& other) noexcept;
  RankHandle& operator=(RankHandle&& other) noexcept;
  RankHandle(const RankHandle&) = delete;
  RankHandle& operator=(const RankHandle&) = delete;

  bool ended() const;

 private:
  int descriptor_ = -1;
  pid_t thread_ = 0;
};

// The calling thread, as the kernel numbers threads.
pid_t this_thread();

}  // namespace fanfold
