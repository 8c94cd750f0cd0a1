// What the lanes of a warp do with matrices together (ldmatrix, mma, mma.sp).
#pragma once

#include <cstdint>

#include "dspattn/dtype.h"
#include "emulator/machine.h"

namespace dspattn::emulator {

// Four matrices of 8 rows of 16 bytes; the lanes give the rows' addresses.
void load_matrices(std::uint32_t (&words)[4], std::uint32_t address, bool transposed);

// acc[16 x 8] (+)= A[16 x 32 bytes] B[32 bytes x 8]; a sparse A has 32 bytes of kept values, and B is twice as deep.
struct WarpProduct {
  DType type{};  // f32: in tf32
  bool sparse = false;
  int metadata_pair = 0;  // lanes 2p and 2p + 1 of a quad hold the metadata
  bool from_zero = false;
};
struct WarpOperands {
  float (&accumulators)[4];
  const std::uint32_t (&a)[4];
  std::uint32_t b[4];
  std::uint32_t metadata = 0;
};
void multiply(const WarpProduct& product, const WarpOperands& operands);

}  // namespace dspattn::emulator
