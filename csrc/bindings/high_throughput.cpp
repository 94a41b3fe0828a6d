#include "bindings/bindings.h"

namespace fanfold::bindings {

void bind_high_throughput(nanobind::module_&) {}

}  // namespace fanfold::bindings
