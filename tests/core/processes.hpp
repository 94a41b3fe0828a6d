// A second process for tests, and pipes to it.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <iostream>

#include "check.hpp"

namespace fanfold {

// A process that runs `body`, which ends with pause(), until it is killed.
struct Child {
  explicit Child(const std::function<void()>& body) : pid(fork()) {
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      run(body);
      while (pause() != 0) continue;
    }
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  void end() {
    if (pid > 0) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    pid = -1;
  }

  // What the body throws ends it here: the tests behind it are the parent's.
  static void run(const std::function<void()>& body) noexcept {
    try {
      body();
    } catch (const check::Failure& failure) {
      std::cerr << "in the child process: " << failure.message << std::endl;
    } catch (const std::exception& error) {
      std::cerr << "in the child process: " << error.what() << std::endl;
    }
  }

  pid_t pid;
};

struct Pipes {
  Pipes() {
    for (auto& ends : descriptors) CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
  }
  ~Pipes() {
    for (auto& ends : descriptors) {
      for (const int end : ends) close(end);
    }
  }
  // `side` 0 writes to the first pipe and reads from the second.
  bool put(int side, const void* data, size_t bytes) {
    return write(descriptors[side][1], data, bytes) == static_cast<ssize_t>(bytes);
  }
  // False also if nothing comes, as from a side that has ended.
  bool get(int side, void* data, size_t bytes) {
    pollfd waits{.fd = descriptors[1 - side][0], .events = POLLIN, .revents = 0};
    return poll(&waits, 1, kMostWaitMs) == 1 &&
           read(waits.fd, data, bytes) == static_cast<ssize_t>(bytes);
  }

  static constexpr int kMostWaitMs = 30'000;
  int descriptors[2][2] = {};
};

}  // namespace fanfold
