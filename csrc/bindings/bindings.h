// One function per stem. Each adds the classes of its stem to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace fanfold::bindings {

void bind_errors(nanobind::module_& module);
void bind_flow_control(nanobind::module_& module);
void bind_numeric(nanobind::module_& module);
void bind_proxy_carrier(nanobind::module_& module);
void bind_ring(nanobind::module_& module);
void bind_symmetric(nanobind::module_& module);
void bind_tensor_pattern(nanobind::module_& module);
void bind_transport(nanobind::module_& module);
void bind_low_latency(nanobind::module_& module);
void bind_high_throughput(nanobind::module_& module);
void bind_cuda(nanobind::module_& module);
void bind_cuda_formats(nanobind::module_& module);
void bind_cuda_ring(nanobind::module_& module);
void bind_cuda_fused_moe(nanobind::module_& module);
void bind_cuda_grouped_gemm(nanobind::module_& module);
void bind_cuda_low_latency(nanobind::module_& module);
void bind_cuda_hosts(nanobind::module_& module);
void bind_cuda_high_throughput(nanobind::module_& module);

}  // namespace fanfold::bindings
