// The plugin's settings, from the environment variable FANFOLD_NCCL_PLUGIN:
//
//   FANFOLD_NCCL_PLUGIN="interface=eth0,seed=7,delay_us=200"
//
// | key           | default              | meaning                                               |
// |---------------|----------------------|-------------------------------------------------------|
// | interface     | the first usable one | network interface of the TCP connections              |
// | wire          | auto                 | `tcp`: also ranks of one host exchange bytes over TCP |
// | timeout_ms    | 60000                | longest wait for other ranks in `connect` and in a    |
// |               |                      | registration, and for a host that takes no bytes      |
// | seed          | 0                    | of the decisions below                                |
// | delay_us      | 0                    | longest delay of an operation, and of its answer      |
// | swap_one_in   | 0                    | one put in so many overtakes the put before it if     |
// |               |                      | that still waits, so set delay_us, too; never a put   |
// |               |                      | with a signal, a get or a flush                       |
// | error_one_in  | 0                    | one operation in so many breaks the communicator as a |
// |               |                      | dead peer does                                        |
//
// 0 switches a key off. A decision depends only on the seed, the two ranks, the context and on how
// many operations went from the one rank to the other in this context before.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "nccl_plugin/log.h"

namespace fanfold::nccl_plugin {

struct Settings {
  std::string interface;
  bool tcp_only = false;
  int64_t timeout_ms = 60'000;
  uint64_t seed = 0;
  int64_t delay_us = 0;
  int32_t swap_one_in = 0;
  int32_t error_one_in = 0;

  bool is_hostile() const { return delay_us > 0 || swap_one_in > 0 || error_one_in > 0; }
};

// Stores what `text` sets, and leaves the rest of `settings` alone.
Problem parse_settings(std::string_view text, Settings& settings);

// Reads the environment.
Problem read_settings(Settings& settings);

// Ranks with the same identity share a host: the hash of the kernel's boot, of the namespaces that
// shared memory needs, and of NCCL_HOSTID, so that one machine can act as several hosts.
uint64_t host_identity();

}  // namespace fanfold::nccl_plugin
