// The module fanfold._core. It passes addresses as integers, so that it does not depend on torch.
#include "bindings/bindings.h"

NB_MODULE(_core, module) {
  module.doc() =
      "The C++ core (csrc/bindings). Memory of the host is a pair of address and bytes\n"
      "(fanfold/lending.py), or None. Addresses on GPUs are integers; 0 is null.";
  // Objects that live until the interpreter ends are no leak.
  nanobind::set_leak_warnings(false);
  fanfold::bindings::bind_errors(module);
  fanfold::bindings::bind_flow_control(module);
  fanfold::bindings::bind_numeric(module);
  fanfold::bindings::bind_proxy_carrier(module);
  fanfold::bindings::bind_ring(module);
  fanfold::bindings::bind_symmetric(module);
  fanfold::bindings::bind_tensor_pattern(module);
  fanfold::bindings::bind_transport(module);
  fanfold::bindings::bind_low_latency(module);
  fanfold::bindings::bind_high_throughput(module);
  fanfold::bindings::bind_cuda(module);
  fanfold::bindings::bind_cuda_formats(module);
  fanfold::bindings::bind_cuda_ring(module);
  fanfold::bindings::bind_cuda_fused_moe(module);
  fanfold::bindings::bind_cuda_grouped_gemm(module);
  fanfold::bindings::bind_cuda_low_latency(module);
  fanfold::bindings::bind_cuda_hosts(module);
  fanfold::bindings::bind_cuda_high_throughput(module);
}
