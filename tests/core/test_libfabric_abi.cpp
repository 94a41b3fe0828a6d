// csrc/transport/libfabric_abi.h against libfabric's own headers.
#include <cstddef>
#include <iostream>

#include "check.hpp"
#include "transport/libfabric_abi.h"

#if defined(FANFOLD_LIBFABRIC_HEADERS)
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

namespace ours = fanfold::transport::libfabric;

#define SAME(value, theirs) CHECK_EQ(static_cast<uint64_t>(value), static_cast<uint64_t>(theirs))
#define SAME_PLACE(type, member, their_type, their_member)                                      \
  do {                                                                                          \
    CHECK_EQ(offsetof(ours::type, member), offsetof(their_type, their_member));                 \
    CHECK_EQ(sizeof(decltype(ours::type::member)), sizeof(decltype(their_type::their_member))); \
  } while (false)

TEST(libfabric_abi_has_the_constants_of_the_headers) {
  SAME(ours::kMsg, FI_MSG);
  SAME(ours::kRma, FI_RMA);
  SAME(ours::kWrite, FI_WRITE);
  SAME(ours::kRecv, FI_RECV);
  SAME(ours::kSend, FI_SEND);
  SAME(ours::kTransmit, FI_TRANSMIT);
  SAME(ours::kRemoteWrite, FI_REMOTE_WRITE);
  SAME(ours::kRemoteCqData, FI_REMOTE_CQ_DATA);
  SAME(ours::kHmem, FI_HMEM);
  SAME(ours::kModeContext, FI_CONTEXT);
  SAME(ours::kModeContext2, FI_CONTEXT2);
  SAME(ours::kModeRxCqData, FI_RX_CQ_DATA);
  SAME(ours::kMrLocal, FI_MR_LOCAL);
  SAME(ours::kMrRaw, FI_MR_RAW);
  SAME(ours::kMrVirtAddr, FI_MR_VIRT_ADDR);
  SAME(ours::kMrAllocated, FI_MR_ALLOCATED);
  SAME(ours::kMrProvKey, FI_MR_PROV_KEY);
  SAME(ours::kMrEndpoint, FI_MR_ENDPOINT);
  SAME(ours::kMrHmem, FI_MR_HMEM);
  SAME(ours::kHmemSystem, FI_HMEM_SYSTEM);
  SAME(ours::kHmemCuda, FI_HMEM_CUDA);
  SAME(ours::kOptEndpoint, FI_OPT_ENDPOINT);
  // The option that Fanfold sets came after this one.
  SAME(ours::kOptCudaApiPermitted, FI_OPT_XPU_TRIGGER + 1);
  SAME(ours::kAvTable, FI_AV_TABLE);
  SAME(ours::kProgressManual, FI_PROGRESS_MANUAL);
  SAME(ours::kThreadDomain, FI_THREAD_DOMAIN);
  SAME(ours::kResourceMgmtEnabled, FI_RM_ENABLED);
  SAME(ours::kEpRdm, FI_EP_RDM);
  SAME(ours::kCqFormatData, FI_CQ_FORMAT_DATA);
  SAME(ours::kWaitNone, FI_WAIT_NONE);
  SAME(ours::kBusPci, FI_BUS_PCI);
  SAME(ours::kLinkDown, FI_LINK_DOWN);
  SAME(ours::kLinkUp, FI_LINK_UP);
  SAME(ours::kControlEnable, FI_ENABLE);
  SAME(ours::kSockaddrIn, FI_SOCKADDR_IN);
  SAME(ours::kSockaddrIn6, FI_SOCKADDR_IN6);
  SAME(ours::kErrorAvailable, FI_EAVAIL);
  SAME(ours::kAddrUnspec, FI_ADDR_UNSPEC);
  SAME(ours::kAddrNotAvailable, FI_ADDR_NOTAVAIL);
  SAME(ours::kKeyNotAvailable, FI_KEY_NOTAVAIL);
  SAME(ours::version(1, 17), FI_VERSION(1, 17));
  CHECK_EQ(sizeof(ours::Context2), sizeof(fi_context2));
}

TEST(libfabric_abi_places_the_members_of_fi_info) {
  CHECK_EQ(sizeof(ours::Info), sizeof(fi_info));
  SAME_PLACE(Info, next, fi_info, next);
  SAME_PLACE(Info, caps, fi_info, caps);
  SAME_PLACE(Info, mode, fi_info, mode);
  SAME_PLACE(Info, addr_format, fi_info, addr_format);
  SAME_PLACE(Info, src_addrlen, fi_info, src_addrlen);
  SAME_PLACE(Info, src_addr, fi_info, src_addr);
  SAME_PLACE(Info, dest_addr, fi_info, dest_addr);
  SAME_PLACE(Info, handle, fi_info, handle);
  SAME_PLACE(Info, tx_attr, fi_info, tx_attr);
  SAME_PLACE(Info, rx_attr, fi_info, rx_attr);
  SAME_PLACE(Info, ep_attr, fi_info, ep_attr);
  SAME_PLACE(Info, domain_attr, fi_info, domain_attr);
  SAME_PLACE(Info, fabric_attr, fi_info, fabric_attr);
  SAME_PLACE(Info, nic, fi_info, nic);
  SAME_PLACE(TxAttr, mode, fi_tx_attr, mode);
  SAME_PLACE(TxAttr, op_flags, fi_tx_attr, op_flags);
  SAME_PLACE(TxAttr, inject_size, fi_tx_attr, inject_size);
  SAME_PLACE(TxAttr, size, fi_tx_attr, size);
  SAME_PLACE(RxAttr, mode, fi_rx_attr, mode);
  SAME_PLACE(RxAttr, size, fi_rx_attr, size);
  SAME_PLACE(EpAttr, type, fi_ep_attr, type);
  SAME_PLACE(EpAttr, protocol, fi_ep_attr, protocol);
  SAME_PLACE(EpAttr, max_msg_size, fi_ep_attr, max_msg_size);
  SAME_PLACE(EpAttr, auth_key, fi_ep_attr, auth_key);
  SAME_PLACE(DomainAttr, name, fi_domain_attr, name);
  SAME_PLACE(DomainAttr, threading, fi_domain_attr, threading);
  SAME_PLACE(DomainAttr, control_progress, fi_domain_attr, control_progress);
  SAME_PLACE(DomainAttr, data_progress, fi_domain_attr, data_progress);
  SAME_PLACE(DomainAttr, resource_mgmt, fi_domain_attr, resource_mgmt);
  SAME_PLACE(DomainAttr, av_type, fi_domain_attr, av_type);
  SAME_PLACE(DomainAttr, mr_mode, fi_domain_attr, mr_mode);
  SAME_PLACE(DomainAttr, mr_key_size, fi_domain_attr, mr_key_size);
  SAME_PLACE(DomainAttr, cq_data_size, fi_domain_attr, cq_data_size);
  SAME_PLACE(DomainAttr, caps, fi_domain_attr, caps);
  SAME_PLACE(DomainAttr, mode, fi_domain_attr, mode);
  CHECK_EQ(sizeof(ours::FabricAttr), sizeof(fi_fabric_attr));
  SAME_PLACE(FabricAttr, name, fi_fabric_attr, name);
  SAME_PLACE(FabricAttr, prov_name, fi_fabric_attr, prov_name);
}

TEST(libfabric_abi_places_the_members_of_a_nic) {
  SAME_PLACE(Nic, device, fid_nic, device_attr);
  SAME_PLACE(Nic, bus, fid_nic, bus_attr);
  SAME_PLACE(Nic, link, fid_nic, link_attr);
  SAME_PLACE(DeviceAttr, name, fi_device_attr, name);
  SAME_PLACE(DeviceAttr, driver, fi_device_attr, driver);
  SAME_PLACE(BusAttr, type, fi_bus_attr, bus_type);
  SAME_PLACE(BusAttr, pci_domain, fi_bus_attr, attr.pci.domain_id);
  SAME_PLACE(BusAttr, pci_bus, fi_bus_attr, attr.pci.bus_id);
  SAME_PLACE(BusAttr, pci_device, fi_bus_attr, attr.pci.device_id);
  SAME_PLACE(BusAttr, pci_function, fi_bus_attr, attr.pci.function_id);
  SAME_PLACE(LinkAttr, speed, fi_link_attr, speed);
  SAME_PLACE(LinkAttr, state, fi_link_attr, state);
}

TEST(libfabric_abi_has_the_structs_that_it_passes) {
  CHECK_EQ(sizeof(ours::AvAttr), sizeof(fi_av_attr));
  SAME_PLACE(AvAttr, type, fi_av_attr, type);
  SAME_PLACE(AvAttr, flags, fi_av_attr, flags);
  CHECK_EQ(sizeof(ours::CqAttr), sizeof(fi_cq_attr));
  SAME_PLACE(CqAttr, size, fi_cq_attr, size);
  SAME_PLACE(CqAttr, format, fi_cq_attr, format);
  SAME_PLACE(CqAttr, wait_obj, fi_cq_attr, wait_obj);
  SAME_PLACE(CqAttr, wait_cond, fi_cq_attr, wait_cond);
  SAME_PLACE(CqAttr, wait_set, fi_cq_attr, wait_set);
  CHECK_EQ(sizeof(ours::CqEntry), sizeof(fi_cq_data_entry));
  SAME_PLACE(CqEntry, context, fi_cq_data_entry, op_context);
  SAME_PLACE(CqEntry, flags, fi_cq_data_entry, flags);
  SAME_PLACE(CqEntry, bytes, fi_cq_data_entry, len);
  SAME_PLACE(CqEntry, immediate, fi_cq_data_entry, data);
  CHECK(sizeof(ours::CqError) >= sizeof(fi_cq_err_entry));
  SAME_PLACE(CqError, context, fi_cq_err_entry, op_context);
  SAME_PLACE(CqError, error, fi_cq_err_entry, err);
  SAME_PLACE(CqError, provider_error, fi_cq_err_entry, prov_errno);
  SAME_PLACE(CqError, detail, fi_cq_err_entry, err_data);
  SAME_PLACE(CqError, detail_bytes, fi_cq_err_entry, err_data_size);
}

TEST(libfabric_abi_has_the_attributes_of_a_registration) {
  CHECK(sizeof(ours::MrAttr) >= sizeof(fi_mr_attr));
  SAME_PLACE(MrAttr, ranges, fi_mr_attr, mr_iov);
  SAME_PLACE(MrAttr, count, fi_mr_attr, iov_count);
  SAME_PLACE(MrAttr, access, fi_mr_attr, access);
  SAME_PLACE(MrAttr, offset, fi_mr_attr, offset);
  SAME_PLACE(MrAttr, requested_key, fi_mr_attr, requested_key);
  SAME_PLACE(MrAttr, context, fi_mr_attr, context);
  SAME_PLACE(MrAttr, auth_key_size, fi_mr_attr, auth_key_size);
  SAME_PLACE(MrAttr, auth_key, fi_mr_attr, auth_key);
  SAME_PLACE(MrAttr, iface, fi_mr_attr, iface);
  SAME_PLACE(MrAttr, device, fi_mr_attr, device);
  CHECK_EQ(offsetof(ours::MrAttr, device.cuda), offsetof(fi_mr_attr, device.cuda));
#if FI_MAJOR_VERSION > 1 || FI_MINOR_VERSION >= 18
  SAME(ours::kOptCudaApiPermitted, FI_OPT_CUDA_API_PERMITTED);
#endif
#if FI_MAJOR_VERSION > 1 || FI_MINOR_VERSION >= 20
  SAME(ours::kMrDmabuf, FI_MR_DMABUF);
  SAME_PLACE(MrAttr, pages, fi_mr_attr, dmabuf);
  CHECK_EQ(sizeof(ours::MrPages), sizeof(fi_mr_dmabuf));
  SAME_PLACE(MrPages, descriptor, fi_mr_dmabuf, fd);
  SAME_PLACE(MrPages, offset, fi_mr_dmabuf, offset);
  SAME_PLACE(MrPages, bytes, fi_mr_dmabuf, len);
  SAME_PLACE(MrPages, base, fi_mr_dmabuf, base_addr);
#endif
}

TEST(libfabric_abi_places_the_functions_of_the_tables) {
  CHECK_EQ(sizeof(ours::Fid), sizeof(fid));
  SAME_PLACE(Fid, ops, fid, ops);
  SAME_PLACE(FidOps, close, fi_ops, close);
  SAME_PLACE(FidOps, bind, fi_ops, bind);
  SAME_PLACE(FidOps, control, fi_ops, control);
  SAME_PLACE(Fabric, ops, fid_fabric, ops);
  SAME_PLACE(FabricOps, domain, fi_ops_fabric, domain);
  SAME_PLACE(Domain, ops, fid_domain, ops);
  SAME_PLACE(Domain, mr, fid_domain, mr);
  SAME_PLACE(DomainOps, av_open, fi_ops_domain, av_open);
  SAME_PLACE(DomainOps, cq_open, fi_ops_domain, cq_open);
  SAME_PLACE(DomainOps, endpoint, fi_ops_domain, endpoint);
  SAME_PLACE(Fabric, api_version, fid_fabric, api_version);
  SAME_PLACE(MrOps, reg, fi_ops_mr, reg);
  SAME_PLACE(MrOps, regattr, fi_ops_mr, regattr);
  SAME_PLACE(MemoryRegion, descriptor, fid_mr, mem_desc);
  SAME_PLACE(MemoryRegion, key, fid_mr, key);
  SAME_PLACE(AddressVector, ops, fid_av, ops);
  SAME_PLACE(AvOps, insert, fi_ops_av, insert);
  SAME_PLACE(CompletionQueue, ops, fid_cq, ops);
  SAME_PLACE(CqOps, read, fi_ops_cq, read);
  SAME_PLACE(CqOps, readerr, fi_ops_cq, readerr);
  SAME_PLACE(CqOps, strerror, fi_ops_cq, strerror);
  SAME_PLACE(Endpoint, ops, fid_ep, ops);
  SAME_PLACE(EpOps, setopt, fi_ops_ep, setopt);
  SAME_PLACE(Endpoint, cm, fid_ep, cm);
  SAME_PLACE(Endpoint, msg, fid_ep, msg);
  SAME_PLACE(Endpoint, rma, fid_ep, rma);
  SAME_PLACE(CmOps, setname, fi_ops_cm, setname);
  SAME_PLACE(CmOps, getname, fi_ops_cm, getname);
  SAME_PLACE(MsgOps, recv, fi_ops_msg, recv);
  SAME_PLACE(RmaOps, writedata, fi_ops_rma, writedata);
  SAME_PLACE(RmaOps, injectdata, fi_ops_rma, injectdata);
}

#else

TEST(libfabric_abi_is_left_out_without_headers) {
  std::cout << "LEFT OUT: libfabric_abi.h is not compared with libfabric's headers, which are not "
               "installed (Debian, Ubuntu: apt install libfabric-dev)"
            << std::endl;
}

#endif
