// What an emulated kernel asks for and gets later: each function acts for the running thread of a CTA.
// Compiled once for all kernels (late.cpp), because containers cost a kernel's compilation more than
// the kernel itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/tensor_map.h"

namespace emulation {

// ---- copies of 16 bytes to shared memory (device/memory.cuh) -------------------------------------

// `from` is null for zeros.
void copy_late(void* to, const void* from);
// Makes a group of the copies since the last group.
void commit_copies();
// Does all groups but the `youngest` ones.
void await_copies(size_t youngest);

// ---- bulk stores (device/bulk.cuh) ----------------------------------------------------------------
// Shared memory is read, and global memory written, when their thread waits for that. A store that the
// thread never waits for is never done.

void store_late(void* global, const void* shared, size_t bytes);
// Makes a group of the stores since the last group; it may be empty.
void commit_stores();
void await_read(size_t youngest);
void await_written(size_t youngest);

// ---- boxes of tensors (device/tensor_copy.cuh) ----------------------------------------------------

struct Box {
  int x, y, z;
};

// Copies a box at once to the address `to` of a CTA's shared memory; how many bytes that are. What
// lies outside of the tensor is zero.
uint32_t load_box(unsigned char* memory, uint32_t to, const fanfold::TensorMap* map, Box at);
// Stores a box as a bulk store does.
void store_box_late(const fanfold::TensorMap* map, Box at, const unsigned char* memory,
                    uint32_t from);

// ---- products of tensor cores (device/wgmma.cuh) --------------------------------------------------

// Of 64 rows of A and `count / 2` columns of B in shared memory, 32 deep: the sums that the running
// thread has in its `d`.
struct Product {
  float* d;
  int count;
  uint64_t a, b;  // descriptors
  bool adds;
};

void multiply_late(const Product& product);
void commit_products();
void await_products(size_t youngest, const unsigned char* memory);

}  // namespace emulation
