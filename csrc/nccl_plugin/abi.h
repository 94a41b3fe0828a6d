// The part of NCCL's plugin ABI that this plugin serves, so that its build needs no NCCL header.
//
// NCCL names the tables ncclNetPlugin_v11, ncclGinPlugin_v11, ncclRmaPlugin_v13 and
// ncclRmaPlugin_v14. NCCL reads the tables and calls their functions; a later NCCL that changes a
// layout looks for a symbol with a higher number. The names of members are ours, their order and
// types are NCCL's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fanfold::nccl_plugin::abi {

enum class Result : int {
  kSuccess = 0,
  kCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
};

// What NCCL exchanges between ranks for a listening object.
inline constexpr size_t kHandleBytes = 128;
// Requests in flight on a connection of NET. The GIN proxy multiplies them by `receives`.
inline constexpr int kNetRequests = 32;

// Kinds of memory
inline constexpr int kHostMemory = 1;
inline constexpr int kCudaMemory = 2;

// Who drives the network: NetProperties::device_type
inline constexpr int kDeviceNone = 0;
inline constexpr int kDeviceGinProxy = 2;

// What a signal does to its word
inline constexpr uint32_t kSignalIncrement = 1;
inline constexpr uint32_t kSignalAdd = 2;

// Levels and subsystems of the logger
inline constexpr int kLogWarn = 2;
inline constexpr int kLogInfo = 3;
inline constexpr unsigned long kLogInit = 0x1;
inline constexpr unsigned long kLogNet = 0x10;

using Logger = void (*)(int level, unsigned long subsystems, const char* file, int line,
                        const char* format, ...);

template <size_t kDevices>
struct MergedDevices {
  int count;
  int devices[kDevices];
};

struct NetProperties11 {
  const char* name;
  const char* pci_path;
  uint64_t guid;
  int memory_kinds;  // kHostMemory, kCudaMemory
  int registers_globally;
  int forces_flush;
  int mbps;
  int port;
  float latency_us;
  int connections;
  int receives;  // that one irecv may group
  int device_type;
  int device_version;
  MergedDevices<4> merged;
  size_t message_bytes;
  size_t collective_bytes;
  int requests_in_one;
};
static_assert(sizeof(NetProperties11) == 112);
static_assert(offsetof(NetProperties11, memory_kinds) == 24);
static_assert(offsetof(NetProperties11, latency_us) == 44);
static_assert(offsetof(NetProperties11, device_type) == 56);
static_assert(offsetof(NetProperties11, merged) == 64);
static_assert(offsetof(NetProperties11, message_bytes) == 88);
static_assert(offsetof(NetProperties11, requests_in_one) == 104);

struct NetProperties12 {
  const char* name;
  const char* pci_path;
  uint64_t guid;
  int memory_kinds;
  int registers_globally;
  int forces_flush;
  int mbps;
  int port;
  float latency_us;
  int connections;
  int receives;
  int device_type;
  int device_version;
  MergedDevices<8> merged;
  size_t message_bytes;
  size_t collective_bytes;
  int requests_in_one;
  int16_t rail;
  int16_t plane;
};
static_assert(sizeof(NetProperties12) == 128);
static_assert(offsetof(NetProperties12, merged) == 64);
static_assert(offsetof(NetProperties12, message_bytes) == 104);
static_assert(offsetof(NetProperties12, rail) == 124);

struct GinConfig13 {
  int signals;
  int counters;
  int contexts;
  int queue_depth;
  int traffic_class;
};

// The first members; a later revision of the same version appends the stride of ranks.
struct RmaConfig14 {
  int contexts;
  int traffic_class;
};

struct Net11 {
  const char* name;
  Result (*init)(void** instance, uint64_t comm, void* config, Logger, void* profiler);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, NetProperties11*);
  Result (*listen)(void* instance, int device, void* handle, void** listener);
  Result (*connect)(void* instance, int device, void* handle, void** sender, void** device_handle);
  Result (*accept)(void* listener, void** receiver, void** device_handle);
  Result (*register_memory)(void* comm, void* data, size_t bytes, int kind, void** memory);
  Result (*register_dmabuf)(void* comm, void* data, size_t bytes, int kind, uint64_t offset,
                            int descriptor, void** memory);
  Result (*deregister)(void* comm, void* memory);
  Result (*send)(void* sender, void* data, size_t bytes, int tag, void* memory, void* profiler,
                 void** request);
  Result (*receive)(void* receiver, int count, void** data, size_t* bytes, int* tags,
                    void** memories, void** profilers, void** request);
  Result (*flush)(void* receiver, int count, void** data, int* bytes, void** memories,
                  void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_sender)(void* sender);
  Result (*close_receiver)(void* receiver);
  Result (*close_listener)(void* listener);
  Result (*device_memory)(void* comm, void* memory, void** device_memory);
  Result (*receive_consumed)(void* receiver, int count, void* request);
  Result (*merge_devices)(int* device, void* devices);
  Result (*finalize)(void* instance);
  Result (*set_attributes)(void* instance, void* attributes);
};
static_assert(sizeof(Net11) == 22 * sizeof(void*));
static_assert(offsetof(Net11, send) == 10 * sizeof(void*));
static_assert(offsetof(Net11, finalize) == 20 * sizeof(void*));

struct Gin11 {
  const char* name;
  Result (*init)(void** instance, uint64_t comm, Logger);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, NetProperties11*);
  Result (*listen)(void* instance, int device, void* handle, void** listener);
  Result (*connect)(void* instance, void* handles[], int ranks, int rank, void* listener,
                    void** comm);
  Result (*create_context)(void* comm, int signals, int counters, void** context,
                           void** device_handle);
  Result (*register_memory)(void* comm, void* data, size_t bytes, int kind, uint64_t flags,
                            void** memory, void** device_memory);
  Result (*register_dmabuf)(void* comm, void* data, size_t bytes, int kind, uint64_t offset,
                            int descriptor, uint64_t flags, void** memory, void** device_memory);
  Result (*deregister)(void* comm, void* memory);
  Result (*destroy_context)(void* context);
  Result (*close)(void* comm);
  Result (*close_listener)(void* listener);
  Result (*put)(void* comm, uint64_t source_offset, void* source, size_t bytes,
                uint64_t target_offset, void* target, uint32_t rank, void** request);
  Result (*put_signal)(void* comm, uint64_t source_offset, void* source, size_t bytes,
                       uint64_t target_offset, void* target, uint32_t rank, uint64_t signal_offset,
                       void* signal, uint64_t value, uint32_t operation, void** request);
  Result (*test)(void* comm, void* request, int* done);
  Result (*progress)(void* comm);
  Result (*query_error)(void* comm, bool* has_error);
  Result (*finalize)(void* instance);
};
static_assert(sizeof(Gin11) == 19 * sizeof(void*));
static_assert(offsetof(Gin11, put) == 13 * sizeof(void*));

// From here on operations take a set of contexts and the number of one of them.
struct Rma13 {
  const char* name;
  Result (*init)(void** instance, uint64_t comm, Logger);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, NetProperties12*);
  Result (*listen)(void* instance, int device, void* handle, void** listener);
  Result (*connect)(void* instance, void* handles[], int ranks, int rank, void* listener,
                    void** comm);
  Result (*create_context)(void* comm, GinConfig13*, void** contexts, void** device_handle);
  Result (*register_memory)(void* comm, void* data, size_t bytes, int kind, uint64_t flags,
                            void** memory, void** device_memory);
  Result (*register_dmabuf)(void* comm, void* data, size_t bytes, int kind, uint64_t offset,
                            int descriptor, uint64_t flags, void** memory, void** device_memory);
  Result (*deregister)(void* comm, void* memory);
  Result (*destroy_context)(void* contexts);
  Result (*close)(void* comm);
  Result (*close_listener)(void* listener);
  Result (*put)(void* contexts, int context, uint64_t source_offset, void* source, size_t bytes,
                uint64_t target_offset, void* target, uint32_t rank, void** request);
  Result (*put_signal)(void* contexts, int context, uint64_t source_offset, void* source,
                       size_t bytes, uint64_t target_offset, void* target, uint32_t rank,
                       uint64_t signal_offset, void* signal, uint64_t value, uint32_t operation,
                       void** request);
  Result (*get)(void* contexts, int context, uint64_t remote_offset, void* remote, size_t bytes,
                uint64_t local_offset, void* local, uint32_t rank, void** request);
  Result (*flush)(void* contexts, int context, void* memory, uint32_t rank, void** request);
  Result (*test)(void* comm, void* request, int* done);
  Result (*progress)(void* contexts);
  Result (*query_error)(void* contexts, bool* has_error);
  Result (*finalize)(void* instance);
};
static_assert(sizeof(Rma13) == 21 * sizeof(void*));
static_assert(offsetof(Rma13, put) == 13 * sizeof(void*));
static_assert(offsetof(Rma13, test) == 17 * sizeof(void*));

struct Rma14 {
  const char* name;
  Result (*init)(void** instance, uint64_t comm, Logger);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, NetProperties12*);
  Result (*listen)(void* instance, int device, void* handle, void** listener);
  Result (*connect)(void* instance, void* handles[], int ranks, int rank, void* listener,
                    void** comm);
  Result (*create_context)(void* comm, RmaConfig14*, void** contexts);
  Result (*register_memory)(void* comm, void* data, size_t bytes, int kind, uint64_t flags,
                            void** memory);
  Result (*register_dmabuf)(void* comm, void* data, size_t bytes, int kind, uint64_t offset,
                            int descriptor, uint64_t flags, void** memory);
  Result (*deregister)(void* comm, void* memory);
  Result (*destroy_context)(void* contexts);
  Result (*close)(void* comm);
  Result (*close_listener)(void* listener);
  Result (*put)(void* contexts, int context, uint64_t source_offset, void* source, size_t bytes,
                uint64_t target_offset, void* target, uint32_t rank, void** request);
  Result (*put_signal)(void* contexts, int context, uint64_t source_offset, void* source,
                       size_t bytes, uint64_t target_offset, void* target, uint32_t rank,
                       uint64_t signal_offset, void* signal, uint64_t value, uint32_t operation,
                       bool strong, void** request);
  Result (*get)(void* contexts, int context, uint64_t remote_offset, void* remote, size_t bytes,
                uint64_t local_offset, void* local, uint32_t rank, void** request);
  Result (*flush)(void* contexts, int context, void* memory, uint32_t rank, void** request);
  Result (*test)(void* comm, void* request, int* done);
  Result (*progress)(void* contexts);
  Result (*query_error)(void* contexts, bool* has_error);
  Result (*finalize)(void* instance);
};
static_assert(sizeof(Rma14) == 21 * sizeof(void*));
static_assert(offsetof(Rma14, put_signal) == 14 * sizeof(void*));

}  // namespace fanfold::nccl_plugin::abi

namespace fanfold::nccl_plugin {

#define FANFOLD_NCCL_EXPORT __attribute__((visibility("default")))

// What NCCL looks up in the library.
extern "C" {
FANFOLD_NCCL_EXPORT extern const abi::Net11 ncclNetPlugin_v11;
FANFOLD_NCCL_EXPORT extern const abi::Gin11 ncclGinPlugin_v11;
FANFOLD_NCCL_EXPORT extern const abi::Rma13 ncclRmaPlugin_v13;
FANFOLD_NCCL_EXPORT extern const abi::Rma14 ncclRmaPlugin_v14;
}

}  // namespace fanfold::nccl_plugin
