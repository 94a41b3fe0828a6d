// What measurements of rings return.
#pragma once

#include <nanobind/nanobind.h>

#include "ring/measure.h"

namespace fanfold::bindings {

using RingFields = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;

RingFields fields_of(const RingThroughput& found);
RingFields fields_of(const RingLatency& found);

}  // namespace fanfold::bindings
