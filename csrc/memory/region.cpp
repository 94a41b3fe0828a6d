#include "memory/region.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/fork.h"

namespace fanfold {

Region::Region(int descriptor, int64_t bytes) : bytes_(bytes), descriptor_(descriptor) {
  void* data =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close_descriptor();
    throw SystemFailure("cannot map " + std::to_string(bytes) + " bytes of shared memory", error);
  }
  const uint32_t owner = fork_generation();
  const auto unmap = [bytes, owner](std::byte* mapped) {
    // A forked child does not have the mapping, and may have mapped other memory at its address.
    if (fork_generation() == owner) munmap(mapped, static_cast<size_t>(bytes));
  };
  data_ = std::shared_ptr<std::byte>(static_cast<std::byte*>(data), unmap);
  // A forked child (for example a data loader) must neither keep the memory alive nor write to it.
  madvise(data, static_cast<size_t>(bytes), MADV_DONTFORK);
}

Region::Region(Region&& other) noexcept
    : data_(std::move(other.data_)), bytes_(std::exchange(other.bytes_, 0)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

Region& Region::operator=(Region&& other) noexcept {
  if (this != &other) {
    unmap();
    data_ = std::move(other.data_);
    bytes_ = std::exchange(other.bytes_, 0);
    descriptor_ = std::exchange(other.descriptor_, -1);
  }
  return *this;
}

Region Region::create(int64_t bytes) {
  const int descriptor = memfd_create("fanfold", MFD_CLOEXEC);
  if (descriptor < 0) throw SystemFailure("cannot create shared memory (memfd_create)", errno);
  if (fchmod(descriptor, 0600) != 0 || ftruncate(descriptor, bytes) != 0) {
    const int error = errno;
    close(descriptor);
    throw SystemFailure("cannot size shared memory to " + std::to_string(bytes) + " bytes", error);
  }
  return Region(descriptor, bytes);
}

Region Region::open(pid_t pid, int descriptor, int64_t bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) {
    throw SystemFailure("cannot open the shared memory of process " + std::to_string(pid) +
                            " through " + path +
                            " (the ranks must run as one user in one PID namespace)",
                        errno);
  }
  struct stat status{};
  if (fstat(opened, &status) != 0 || status.st_size < bytes) {
    close(opened);
    throw SystemFailure("the shared memory behind " + path + " holds " +
                            std::to_string(status.st_size) + " bytes instead of " +
                            std::to_string(bytes),
                        EINVAL);
  }
  Region region(opened, bytes);
  region.close_descriptor();
  return region;
}

Region Region::part(int64_t offset, int64_t bytes) const {
  Region part;
  part.data_ = std::shared_ptr<std::byte>(data_, data_.get() + offset);
  part.bytes_ = bytes;
  return part;
}

void Region::close_descriptor() {
  if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
}

void Region::unmap() {
  close_descriptor();
  data_.reset();
}

RankHandle::RankHandle(pid_t pid, pid_t thread) {
  if (pid == getpid()) {
    thread_ = thread;
  } else {
    descriptor_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  }
}

RankHandle::~RankHandle() {
  if (descriptor_ >= 0) close(descriptor_);
}

RankHandle::RankHandle(RankHandle&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), thread_(std::exchange(other.thread_, 0)) {}

RankHandle& RankHandle::operator=(RankHandle&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(thread_, other.thread_);
  return *this;
}

bool RankHandle::ended() const {
  // The kernel never delivers signal 0. It may give a new thread the number of one that has ended;
  // the timeout still bounds the wait then.
  if (thread_ != 0) return syscall(SYS_tgkill, getpid(), thread_, 0) != 0 && errno == ESRCH;
  // Old kernels have no pidfd_open. There the timeout alone bounds the wait.
  if (descriptor_ < 0) return false;
  pollfd request{descriptor_, POLLIN, 0};
  return poll(&request, 1, 0) > 0;
}

pid_t this_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

}  // namespace fanfold
