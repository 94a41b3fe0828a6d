// One kernel for one set of constants as a library: KERNEL is its file, ENTRY its function, ARGUMENTS
// the struct it takes.
#include KERNEL

// Of a CTA, as the kernel that has run took it.
extern "C" __attribute__((visibility("default"))) size_t dynamic_shared_bytes() {
  return fanfold::emulated_shared_bytes;
}

// Runs the kernel on `ctas` CTAs and returns when it has ended.
extern "C" __attribute__((visibility("default"))) void emulate(const void* arguments, int ctas) {
  const auto run = [](const void* args) { ENTRY(*static_cast<const fanfold::ARGUMENTS*>(args)); };
  emulation::run_grid(ctas, fanfold::kThreads, run, arguments);
}
