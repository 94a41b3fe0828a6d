// The tables of GIN and RMA. Each function converts and calls; nothing is thrown into NCCL.
//
// Who calls what (NCCL 2.28.9 and 2.30.7): a thread of the application calls `init` to `connect`,
// the registrations and the ends, and may block there. NCCL's GIN progress thread posts operations
// and tests requests meanwhile, and must not block. The wires' threads do the work, so `progress`
// only reports.
#include <cstring>
#include <memory>
#include <vector>

#include "nccl_plugin/comm.h"
#include "nccl_plugin/entry.h"
#include "nccl_plugin/gpu_memory.h"

namespace fanfold::nccl_plugin {
namespace {

using abi::Result;
using entry::guarded;

// 8 times kNetRequests: the requests in flight from one context to one rank.
constexpr int kReceives = 8;

// ---- what all versions share ----

Result init(void** instance, uint64_t /*comm*/, abi::Logger logger) {
  return entry::init(instance, logger);
}

template <typename Properties>
Result get_properties(int device, Properties* properties) {
  return guarded("getProperties", [&] {
    entry::describe(*properties, kReceives, abi::kHostMemory | abi::kCudaMemory,
                    abi::kDeviceGinProxy);
    if constexpr (requires { properties->rail; }) properties->rail = properties->plane = -1;
    return entry::check_device(device);
  });
}

Result connect(void* /*instance*/, void* handles[], int ranks, int rank, void* listener,
               void** comm) {
  return guarded("connect", [&] {
    if (ranks < 1 || rank < 0 || rank >= ranks || listener == nullptr) {
      return warn(Result::kInvalidArgument, "connect gets rank " + std::to_string(rank) + " of " +
                                                std::to_string(ranks) + " ranks, or no listener");
    }
    std::vector<Address> addresses(static_cast<size_t>(ranks));
    for (size_t peer = 0; peer < addresses.size(); ++peer) {
      std::memcpy(&addresses[peer], handles[peer], sizeof(Address));
    }
    std::unique_ptr<Comm> fresh;
    const Result result =
        Comm::connect(*static_cast<const Listener*>(listener), addresses, rank, fresh);
    *comm = fresh.release();
    return result;
  });
}

// The number of a registration or a request travels through NCCL as a pointer.
void* as_pointer(uint64_t number) { return reinterpret_cast<void*>(number); }
uint64_t as_number(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

Result register_memory(void* comm, void* data, size_t bytes, int kind, void** memory) {
  return guarded("regMrSym", [&] {
    std::shared_ptr<Memory> fresh;
    if (kind == abi::kHostMemory) {
      fresh = host_memory(data, bytes);
    } else if (kind == abi::kCudaMemory) {
      Problem problem;
      const Driver* driver = load_driver(problem);
      if (driver != nullptr) fresh = gpu_memory(*driver, data, bytes, problem);
      if (!fresh) return warn(Result::kCudaError, problem);
    } else {
      return warn(Result::kInvalidArgument, "memory of the kind " + std::to_string(kind) +
                                                " cannot be registered, only 1 "
                                                "(host) and 2 (CUDA)");
    }
    uint64_t handle = 0;
    const Result result = static_cast<Comm*>(comm)->register_memory(std::move(fresh), handle);
    *memory = as_pointer(handle);
    return result;
  });
}

Result register_both(void* comm, void* data, size_t bytes, int kind, uint64_t /*flags*/,
                     void** memory, void** device_memory) {
  const Result result = register_memory(comm, data, bytes, kind, memory);
  *device_memory = *memory;
  return result;
}

Result register_one(void* comm, void* data, size_t bytes, int kind, uint64_t /*flags*/,
                    void** memory) {
  return register_memory(comm, data, bytes, kind, memory);
}

// getProperties offers no dmabuf, so NCCL does not come here; the memory has an address as well.
Result register_both_dmabuf(void* comm, void* data, size_t bytes, int kind, uint64_t /*offset*/,
                            int /*descriptor*/, uint64_t flags, void** memory,
                            void** device_memory) {
  return register_both(comm, data, bytes, kind, flags, memory, device_memory);
}

Result register_one_dmabuf(void* comm, void* data, size_t bytes, int kind, uint64_t /*offset*/,
                           int /*descriptor*/, uint64_t flags, void** memory) {
  return register_one(comm, data, bytes, kind, flags, memory);
}

Result deregister(void* comm, void* memory) {
  return guarded("deregMrSym",
                 [&] { return static_cast<Comm*>(comm)->deregister(as_number(memory)); });
}

Result post(Comm& comm, const Operation& operation, void** request) {
  return guarded("an operation", [&] {
    uint64_t number = 0;
    const Result result = comm.post(operation, number);
    *request = as_pointer(number);
    return result;
  });
}

Operation put_of(uint64_t source_offset, void* source, size_t bytes, uint64_t target_offset,
                 void* target, uint32_t rank) {
  return {.rank = rank,
          .bytes = bytes,
          .local = {.memory = as_number(source), .offset = source_offset},
          .remote = {.memory = as_number(target), .offset = target_offset}};
}

Result set_signal(Operation& operation, const Place& signal, uint64_t value, uint32_t kind) {
  return guarded("iputSignal", [&] {
    if (kind != abi::kSignalIncrement && kind != abi::kSignalAdd) {
      return warn(Result::kInvalidArgument, "a signal has the operation " + std::to_string(kind) +
                                                ", but must have 1 (increment) or 2 (add)");
    }
    if (signal.memory == 0) {
      return warn(Result::kInvalidArgument, "a put with a signal names no memory of the signal");
    }
    operation.signal = signal;
    operation.signal_value = kind == abi::kSignalIncrement ? 1 : value;
    return Result::kSuccess;
  });
}

Result test(void* comm, void* request, int* done) {
  return guarded("test", [&] {
    bool is_done = false;
    const Result result = static_cast<Comm*>(comm)->test(as_number(request), is_done);
    *done = is_done ? 1 : 0;
    return result;
  });
}

Result progress_comm(void* comm) {
  return guarded("ginProgress", [&] { return static_cast<Comm*>(comm)->state(); });
}

Result query_comm(void* comm, bool* has_error) {
  *has_error = progress_comm(comm) != Result::kSuccess;
  return Result::kSuccess;
}

// ---- GIN v11: a communicator is one context ----

Result no_context(void* /*comm*/, int /*signals*/, int /*counters*/, void** /*context*/,
                  void** /*device_handle*/) {
  return guarded("createContext", [] {
    return warn(Result::kInvalidUsage,
                "createContext of GIN v11 is for kernels that drive a NIC; this plugin serves "
                "NCCL's proxy");
  });
}

Result no_destroy(void* /*context*/) { return Result::kSuccess; }

Result put11(void* comm, uint64_t source_offset, void* source, size_t bytes, uint64_t target_offset,
             void* target, uint32_t rank, void** request) {
  return post(*static_cast<Comm*>(comm),
              put_of(source_offset, source, bytes, target_offset, target, rank), request);
}

Result put_signal11(void* comm, uint64_t source_offset, void* source, size_t bytes,
                    uint64_t target_offset, void* target, uint32_t rank, uint64_t signal_offset,
                    void* signal, uint64_t value, uint32_t kind, void** request) {
  Operation operation = put_of(source_offset, source, bytes, target_offset, target, rank);
  const Place place{.memory = as_number(signal), .offset = signal_offset};
  const Result result = set_signal(operation, place, value, kind);
  if (result != Result::kSuccess) return result;
  return post(*static_cast<Comm*>(comm), operation, request);
}

// ---- RMA: a set of contexts ----

struct Contexts {
  Comm* comm;
  uint32_t first;
  int count;
};

template <typename Config>
Result make_contexts(void* comm, const Config* config, void** contexts) {
  return guarded("createContext", [&] {
    if (config->contexts < 1) {
      return warn(Result::kInvalidArgument, "createContext asks for " +
                                                std::to_string(config->contexts) +
                                                " contexts, but needs at least 1");
    }
    auto* of = static_cast<Comm*>(comm);
    const uint32_t first = of->new_contexts(static_cast<uint32_t>(config->contexts));
    *contexts = new Contexts{.comm = of, .first = first, .count = config->contexts};
    return Result::kSuccess;
  });
}

Result create_contexts13(void* comm, abi::GinConfig13* config, void** contexts,
                         void** device_handle) {
  if (device_handle != nullptr) *device_handle = nullptr;  // some versions pass none
  return make_contexts(comm, config, contexts);
}

Result create_contexts14(void* comm, abi::RmaConfig14* config, void** contexts) {
  return make_contexts(comm, config, contexts);
}

Result destroy_contexts(void* contexts) {
  const std::unique_ptr<Contexts> end(static_cast<Contexts*>(contexts));
  return Result::kSuccess;
}

Result post_in(void* contexts, int context, Operation operation, void** request) {
  const auto& set = *static_cast<const Contexts*>(contexts);
  if (context < 0 || context >= set.count) {
    return guarded("an operation", [&] {
      return warn(Result::kInvalidArgument, "there is no context " + std::to_string(context) +
                                                " among " + std::to_string(set.count));
    });
  }
  operation.context = set.first + static_cast<uint32_t>(context);
  return post(*set.comm, operation, request);
}

Result put(void* contexts, int context, uint64_t source_offset, void* source, size_t bytes,
           uint64_t target_offset, void* target, uint32_t rank, void** request) {
  return post_in(contexts, context,
                 put_of(source_offset, source, bytes, target_offset, target, rank), request);
}

Result put_signal13(void* contexts, int context, uint64_t source_offset, void* source, size_t bytes,
                    uint64_t target_offset, void* target, uint32_t rank, uint64_t signal_offset,
                    void* signal, uint64_t value, uint32_t kind, void** request) {
  Operation operation = put_of(source_offset, source, bytes, target_offset, target, rank);
  const Place place{.memory = as_number(signal), .offset = signal_offset};
  const Result result = set_signal(operation, place, value, kind);
  if (result != Result::kSuccess) return result;
  return post_in(contexts, context, operation, request);
}

// Every signal is strong here: it follows all earlier puts of its context.
Result put_signal14(void* contexts, int context, uint64_t source_offset, void* source, size_t bytes,
                    uint64_t target_offset, void* target, uint32_t rank, uint64_t signal_offset,
                    void* signal, uint64_t value, uint32_t kind, bool /*strong*/, void** request) {
  return put_signal13(contexts, context, source_offset, source, bytes, target_offset, target, rank,
                      signal_offset, signal, value, kind, request);
}

Result get(void* contexts, int context, uint64_t remote_offset, void* remote, size_t bytes,
           uint64_t local_offset, void* local, uint32_t rank, void** request) {
  const Operation operation{.kind = Kind::kGet,
                            .rank = rank,
                            .bytes = bytes,
                            .local = {.memory = as_number(local), .offset = local_offset},
                            .remote = {.memory = as_number(remote), .offset = remote_offset}};
  return post_in(contexts, context, operation, request);
}

Result flush(void* contexts, int context, void* /*memory*/, uint32_t rank, void** request) {
  return post_in(contexts, context, {.kind = Kind::kFlush, .rank = rank}, request);
}

Result progress(void* contexts) {
  return progress_comm(static_cast<const Contexts*>(contexts)->comm);
}

Result query_error(void* contexts, bool* has_error) {
  return query_comm(static_cast<const Contexts*>(contexts)->comm, has_error);
}

}  // namespace

extern "C" {

const abi::Gin11 ncclGinPlugin_v11 = {
    .name = entry::kName,
    .init = init,
    .devices = entry::devices,
    .get_properties = get_properties,
    .listen = entry::listen<Listener>,
    .connect = connect,
    .create_context = no_context,
    .register_memory = register_both,
    .register_dmabuf = register_both_dmabuf,
    .deregister = deregister,
    .destroy_context = no_destroy,
    .close = entry::close<Comm>,
    .close_listener = entry::close<Listener>,
    .put = put11,
    .put_signal = put_signal11,
    .test = test,
    .progress = progress_comm,
    .query_error = query_comm,
    .finalize = entry::finalize,
};

const abi::Rma13 ncclRmaPlugin_v13 = {
    .name = entry::kName,
    .init = init,
    .devices = entry::devices,
    .get_properties = get_properties,
    .listen = entry::listen<Listener>,
    .connect = connect,
    .create_context = create_contexts13,
    .register_memory = register_both,
    .register_dmabuf = register_both_dmabuf,
    .deregister = deregister,
    .destroy_context = destroy_contexts,
    .close = entry::close<Comm>,
    .close_listener = entry::close<Listener>,
    .put = put,
    .put_signal = put_signal13,
    .get = get,
    .flush = flush,
    .test = test,
    .progress = progress,
    .query_error = query_error,
    .finalize = entry::finalize,
};

const abi::Rma14 ncclRmaPlugin_v14 = {
    .name = entry::kName,
    .init = init,
    .devices = entry::devices,
    .get_properties = get_properties,
    .listen = entry::listen<Listener>,
    .connect = connect,
    .create_context = create_contexts14,
    .register_memory = register_one,
    .register_dmabuf = register_one_dmabuf,
    .deregister = deregister,
    .destroy_context = destroy_contexts,
    .close = entry::close<Comm>,
    .close_listener = entry::close<Listener>,
    .put = put,
    .put_signal = put_signal14,
    .get = get,
    .flush = flush,
    .test = test,
    .progress = progress,
    .query_error = query_error,
    .finalize = entry::finalize,
};
}

}  // namespace fanfold::nccl_plugin
