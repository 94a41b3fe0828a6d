// What kernels use of NCCL's device API, over the network of gin.hpp.
#pragma once

#include "gin_device.hpp"
#include "late.hpp"

struct ncclDevComm : emulation::GinDevice {};
struct ncclWindow;
using ncclWindow_t = ncclWindow*;
struct ncclTeam {
  int nRanks, rank;
};
inline ncclTeam ncclTeamWorld(const ncclDevComm& comm) { return {comm.ranks, comm.rank}; }

struct ncclGin_None {};
struct ncclGin_SignalAdd {
  unsigned signal;
  uint64_t value;
};
struct ncclGin_CounterInc {
  unsigned counter;
};

class ncclGin {
 public:
  ncclGin(const ncclDevComm& comm, int context) : comm_(comm) { static_cast<void>(context); }

  void put(ncclTeam, int peer, ncclWindow_t, size_t to, ncclWindow_t, size_t from, size_t bytes,
           ncclGin_None, ncclGin_CounterInc done) const {
    post({peer, to, from, bytes, -1, 0, static_cast<int>(done.counter)});
  }
  void put(ncclTeam, int peer, ncclWindow_t, size_t to, ncclWindow_t, size_t from, size_t bytes,
           ncclGin_SignalAdd add, ncclGin_CounterInc done) const {
    post({peer, to, from, bytes, static_cast<int>(add.signal), add.value,
          static_cast<int>(done.counter)});
  }
  uint64_t readSignal(unsigned signal) const {
    emulation::yield();
    return comm_.signal(comm_.network, comm_.rank, static_cast<int>(signal));
  }
  uint64_t readCounter(unsigned counter) const {
    emulation::yield();
    return comm_.counter(comm_.network, comm_.rank, static_cast<int>(counter));
  }

 private:
  void post(const emulation::GinPut& put) const {
    emulation::yield();
    comm_.put(comm_.network, comm_.rank, put);
  }

  const ncclDevComm& comm_;
};
