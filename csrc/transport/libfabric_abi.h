// The part of libfabric's C ABI that Fanfold uses, so that the build needs no libfabric header.
//
// The layouts are those of API 1.17; later releases only append fields to structs that libfabric
// allocates itself. tests/core/test_libfabric_abi.cpp compares sizes, offsets and constants with
// libfabric's own headers where they are installed. Members without a meaning here keep the place
// of theirs: a function that is not called is a `Unused`.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace fanfold::transport::libfabric {

constexpr uint32_t version(uint32_t major, uint32_t minor) { return major << 16 | minor; }

// The newest API that Fanfold asks for. An older library is asked for its own.
inline constexpr uint32_t kNewestApi = version(1, 17);
// The first API in which a registration names its memory by a dmabuf descriptor (FI_MR_DMABUF). It
// is asked for only together with FI_HMEM.
inline constexpr uint32_t kDmabufApi = version(1, 20);
// The first library whose fi_mr_attr names the owner of the memory.
inline constexpr uint32_t kFirstHmem = version(1, 11);
// The first library that can be kept from calling CUDA (FI_OPT_CUDA_API_PERMITTED).
inline constexpr uint32_t kFirstCudaPermission = version(1, 18);
// The oldest one: its fi_info is the one declared here (FABRIC_1.3).
inline constexpr uint32_t kOldestApi = version(1, 8);

// Capabilities and flags of operations
inline constexpr uint64_t kMsg = 1ULL << 1;
inline constexpr uint64_t kRma = 1ULL << 2;
inline constexpr uint64_t kWrite = 1ULL << 9;
inline constexpr uint64_t kRecv = 1ULL << 10;
inline constexpr uint64_t kSend = 1ULL << 11;
inline constexpr uint64_t kTransmit = kSend;
inline constexpr uint64_t kRemoteWrite = 1ULL << 13;
inline constexpr uint64_t kRemoteCqData = 1ULL << 17;
inline constexpr uint64_t kHmem = 1ULL << 47;

// Mode bits: duties of the application
inline constexpr uint64_t kModeContext = 1ULL << 59;
inline constexpr uint64_t kModeRxCqData = 1ULL << 56;
inline constexpr uint64_t kModeContext2 = 1ULL << 52;

// Memory registration modes
inline constexpr int kMrLocal = 1 << 2;
inline constexpr int kMrRaw = 1 << 3;
inline constexpr int kMrVirtAddr = 1 << 4;
inline constexpr int kMrAllocated = 1 << 5;
inline constexpr int kMrProvKey = 1 << 6;
inline constexpr int kMrEndpoint = 1 << 9;
inline constexpr int kMrHmem = 1 << 10;

// Flags of a registration
inline constexpr uint64_t kMrDmabuf = 1ULL << 40;

// Enumerations
inline constexpr int kAvTable = 2;
inline constexpr int kProgressManual = 2;
inline constexpr int kThreadDomain = 3;
inline constexpr int kResourceMgmtEnabled = 2;
inline constexpr int kEpRdm = 3;
inline constexpr int kCqFormatData = 3;
inline constexpr int kWaitNone = 0;
inline constexpr int kBusPci = 1;
inline constexpr int kLinkDown = 1;
inline constexpr int kLinkUp = 2;
inline constexpr int kControlEnable = 6;
inline constexpr int kHmemSystem = 0;
inline constexpr int kHmemCuda = 1;
inline constexpr int kOptEndpoint = 0;
inline constexpr int kOptCudaApiPermitted = 10;
inline constexpr uint32_t kSockaddrIn = 2;
inline constexpr uint32_t kSockaddrIn6 = 3;

// Errors of libfabric's own; the others are those of errno.h
inline constexpr int kErrorAvailable = 259;

using FiAddr = uint64_t;
inline constexpr FiAddr kAddrUnspec = ~0ULL;
inline constexpr FiAddr kAddrNotAvailable = ~0ULL;
inline constexpr uint64_t kKeyNotAvailable = ~0ULL;

// What a provider with the mode FI_CONTEXT2 may overwrite while an operation is in flight.
struct Context2 {
  void* internal[8];
};

using Unused = void (*)();

struct Fid;

struct FidOps {
  size_t size;
  int (*close)(Fid*);
  int (*bind)(Fid*, Fid* other, uint64_t flags);
  int (*control)(Fid*, int command, void* argument);
  Unused ops_open;
};

struct Fid {
  size_t kind;
  void* context;
  FidOps* ops;
};

struct TxAttr {
  uint64_t caps;
  uint64_t mode;
  uint64_t op_flags;
  uint64_t msg_order;
  uint64_t comp_order;
  size_t inject_size;
  size_t size;
  size_t iov_limit;
  size_t rma_iov_limit;
  uint32_t traffic_class;
};

struct RxAttr {
  uint64_t caps;
  uint64_t mode;
  uint64_t op_flags;
  uint64_t msg_order;
  uint64_t comp_order;
  size_t total_buffered_recv;
  size_t size;
  size_t iov_limit;
};

struct EpAttr {
  int type;
  uint32_t protocol;
  uint32_t protocol_version;
  size_t max_msg_size;
  size_t unused_sizes[4];
  uint64_t mem_tag_format;
  size_t tx_ctx_cnt;
  size_t rx_ctx_cnt;
  size_t auth_key_size;
  uint8_t* auth_key;
};

struct DomainAttr {
  Fid* domain;
  char* name;
  int threading;
  int control_progress;
  int data_progress;
  int resource_mgmt;
  int av_type;
  int mr_mode;
  size_t mr_key_size;
  size_t cq_data_size;
  size_t counts[10];
  uint64_t caps;
  uint64_t mode;
};

struct FabricAttr {
  Fid* fabric;
  char* name;
  char* prov_name;
  uint32_t prov_version;
  uint32_t api_version;
};

struct DeviceAttr {
  char* name;
  char* device_id;
  char* device_version;
  char* vendor_id;
  char* driver;
  char* firmware;
};

struct BusAttr {
  int type;
  uint16_t pci_domain;
  uint8_t pci_bus;
  uint8_t pci_device;
  uint8_t pci_function;
};

struct LinkAttr {
  char* address;
  size_t mtu;
  size_t speed;  // bits per second
  int state;
  char* network_type;
};

struct Nic {
  Fid fid;
  DeviceAttr* device;
  BusAttr* bus;
  LinkAttr* link;
  void* provider;
};

struct Info {
  Info* next;
  uint64_t caps;
  uint64_t mode;
  uint32_t addr_format;
  size_t src_addrlen;
  size_t dest_addrlen;
  void* src_addr;
  void* dest_addr;
  Fid* handle;
  TxAttr* tx_attr;
  RxAttr* rx_attr;
  EpAttr* ep_attr;
  DomainAttr* domain_attr;
  FabricAttr* fabric_attr;
  Nic* nic;
};

// ---- objects and their tables of functions ------------------------------------------------------

struct Domain;
struct AddressVector;
struct CompletionQueue;
struct Endpoint;
struct MemoryRegion;

struct FabricOps {
  size_t size;
  int (*domain)(struct Fabric*, Info*, Domain**, void* context);
};

struct Fabric {
  Fid fid;
  FabricOps* ops;
  uint32_t api_version;
};

struct AvAttr {
  int type;
  int rx_ctx_bits;
  size_t count;
  size_t ep_per_node;
  const char* name;
  void* map_addr;
  uint64_t flags;
};

struct CqAttr {
  size_t size;
  uint64_t flags;
  int format;
  int wait_obj;
  int signaling_vector;
  int wait_cond;
  void* wait_set;
};

struct DomainOps {
  size_t size;
  int (*av_open)(Domain*, AvAttr*, AddressVector**, void* context);
  int (*cq_open)(Domain*, CqAttr*, CompletionQueue**, void* context);
  int (*endpoint)(Domain*, Info*, Endpoint**, void* context);
};

struct MrPages {  // fi_mr_dmabuf, since API 1.20
  int descriptor;
  uint64_t offset;  // of the range, in the pages of the descriptor
  size_t bytes;
  void* base;  // where `offset` 0 lies
};

struct MrAttr {
  union {
    const iovec* ranges;
    const MrPages* pages;  // with the flag FI_MR_DMABUF
  };
  size_t count;
  uint64_t access;
  uint64_t offset;
  uint64_t requested_key;
  void* context;
  size_t auth_key_size;
  uint8_t* auth_key;
  int iface;
  union {
    uint64_t reserved;
    int cuda;
  } device;
  // Libraries since 1.18 read more members than API 1.17 has.
  uint64_t room_for_later_fields[8];
};

struct MrOps {
  size_t size;
  int (*reg)(Fid* domain, const void* data, size_t bytes, uint64_t access, uint64_t offset,
             uint64_t requested_key, uint64_t flags, MemoryRegion**, void* context);
  Unused regv;
  int (*regattr)(Fid* domain, const MrAttr*, uint64_t flags, MemoryRegion**);
};

struct Domain {
  Fid fid;
  DomainOps* ops;
  MrOps* mr;
};

struct MemoryRegion {
  Fid fid;
  void* descriptor;
  uint64_t key;
};

struct AvOps {
  size_t size;
  int (*insert)(AddressVector*, const void* address, size_t count, FiAddr*, uint64_t flags,
                void* context);
};

struct AddressVector {
  Fid fid;
  AvOps* ops;
};

struct CqEntry {  // fi_cq_data_entry
  void* context;
  uint64_t flags;
  size_t bytes;
  void* data;
  uint64_t immediate;
};

struct CqError {  // fi_cq_err_entry
  void* context;
  uint64_t flags;
  size_t bytes;
  void* data;
  uint64_t immediate;
  uint64_t tag;
  size_t more_bytes;
  int error;
  int provider_error;
  void* detail;
  size_t detail_bytes;
  uint64_t room_for_later_fields[4];
};

struct CqOps {
  size_t size;
  ssize_t (*read)(CompletionQueue*, void* entries, size_t count);
  Unused readfrom;
  ssize_t (*readerr)(CompletionQueue*, CqError*, uint64_t flags);
  Unused sread;
  Unused sreadfrom;
  Unused signal;
  const char* (*strerror)(CompletionQueue*, int provider_error, const void* detail, char* text,
                          size_t bytes);
};

struct CompletionQueue {
  Fid fid;
  CqOps* ops;
};

struct EpOps {
  size_t size;
  Unused cancel;
  Unused getopt;
  int (*setopt)(Fid* endpoint, int level, int name, const void* value, size_t bytes);
};

struct CmOps {
  size_t size;
  int (*setname)(Fid* endpoint, void* address, size_t bytes);
  int (*getname)(Fid* endpoint, void* address, size_t* bytes);
};

struct MsgOps {
  size_t size;
  ssize_t (*recv)(Endpoint*, void* data, size_t bytes, void* descriptor, FiAddr source,
                  void* context);
};

struct RmaOps {
  size_t size;
  Unused read;
  Unused readv;
  Unused readmsg;
  Unused write;
  Unused writev;
  Unused writemsg;
  Unused inject;
  ssize_t (*writedata)(Endpoint*, const void* data, size_t bytes, void* descriptor,
                       uint64_t immediate, FiAddr peer, uint64_t address, uint64_t key,
                       void* context);
  ssize_t (*injectdata)(Endpoint*, const void* data, size_t bytes, uint64_t immediate, FiAddr peer,
                        uint64_t address, uint64_t key);
};

struct Endpoint {
  Fid fid;
  EpOps* ops;
  CmOps* cm;
  MsgOps* msg;
  RmaOps* rma;
};

}  // namespace fanfold::transport::libfabric
