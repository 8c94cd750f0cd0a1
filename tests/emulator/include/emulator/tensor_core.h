// Products of a warpgroup (wgmma), which run beside its threads: in order, from when all 128 threads have issued one.
#pragma once

#include <array>
#include <cstdint>

#include "dspattn/dtype.h"

namespace dspattn::emulator {

// D[64 x columns] (+)= A[64 x depth] B[depth x columns]. A has 32 bytes a row; a sparse A is twice as deep, and has
// metadata.
struct Product {
  DType type{};  // f32: in tf32
  int columns = 0;
  bool sparse = false;
  int metadata_pair = 0;  // lanes 2p and 2p + 1 of a quad hold the metadata
  bool accumulate = false;
  bool a_in_shared = false;
  bool a_rows_are_depth = false;  // in shared memory, 16-bit types: else A is stored by rows
  std::uint64_t a_descriptor = 0, b_descriptor = 0;
  bool b_rows_are_depth = false;  // else B is stored by columns
  std::uint32_t window = 0;       // of the block's shared memory; set when it is issued
};

// What one thread gives.
struct Operands {
  float* accumulators = nullptr;  // columns / 2 of them
  std::array<std::uint32_t, 4> a{};
  std::uint32_t metadata = 0;
};

// By the running thread.
void issue(const Product& product, const Operands& operands);
void commit_products();
void await_products(int pending_groups);

// By the machine: a new block; one more product of some warpgroup, false when none can be computed.
void reset_tensor_core(int threads);
bool advance_tensor_core();

}  // namespace dspattn::emulator
