// Translates the core's exceptions into those of fanfold.errors, which compose the messages.
#include <nanobind/stl/string.h>

#include "base/error.h"
#include "base/wait.h"
#include "bindings/bindings.h"

namespace nb = nanobind;

namespace fanfold::bindings {
namespace {

template <typename... Fields>
nb::object make(const char* name, Fields&&... fields) {
  return nb::module_::import_("fanfold.errors").attr(name)(std::forward<Fields>(fields)...);
}

template <typename... Fields>
void raise(const char* name, Fields&&... fields) {
  const nb::object error = make(name, std::forward<Fields>(fields)...);
  PyErr_SetObject(error.type().ptr(), error.ptr());
}

// For what concerns a peer or the network.
template <typename... Fields>
void raise_logged(const char* name, Fields&&... fields) {
  const nb::object error = make("logged", make(name, std::forward<Fields>(fields)...));
  PyErr_SetObject(error.type().ptr(), error.ptr());
}

void translate(const std::exception_ptr& failure, void*) {
  try {
    std::rethrow_exception(failure);
  } catch (const BadArgument& e) {
    raise("ArgumentError", e.argument, e.value, e.bound);
  } catch (const PeerTimeout& e) {
    const TimeoutReport& f = e.report;
    raise_logged("PeerTimeout", f.rank, f.peer, f.phase, f.expected, f.actual, f.seconds,
                 f.peer_gone, f.path);
  } catch (const TransportError& e) {
    const TransportReport& f = e.report;
    raise_logged("TransportError", f.rank, f.peer, f.transport, f.what, f.messages, f.bytes,
                 f.seconds, f.path);
  } catch (const SignalTimeout& e) {
    const SignalReport& f = e.report;
    raise_logged("SignalTimeout", f.rank, f.phase, f.expert, f.block, f.value, f.expected,
                 f.seconds);
  } catch (const PeerRefused& e) {
    raise("PeerRefused", e.report.rank, e.report.peer, e.report.phase, e.report.reason);
  } catch (const RingFull& e) {
    raise("RingFull", e.report.slots, e.report.pushed, e.report.consumed, e.report.seconds);
  } catch (const Misuse& e) {
    raise("UsageError", std::string(e.what()));
  } catch (const SystemFailure& e) {
    raise("SystemFailure", std::string(e.what()));
  } catch (const Unavailable& e) {
    raise("UnavailableError", std::string(e.what()));
  } catch (const DriverFailure& e) {
    raise("DriverFailure", e.report.call, e.report.what, e.report.name, e.report.text);
  }
}

// Waits run without the interpreter lock. They call this function from time to time, so that Ctrl-C
// ends them.
void let_interrupts_through() {
  nb::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace

void bind_errors(nb::module_&) {
  nb::register_exception_translator(translate);
  set_interrupt_check(let_interrupts_through);
}

}  // namespace fanfold::bindings
