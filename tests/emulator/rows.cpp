#include "cuda/rows.h"

#include "cuda/sm90/fused/rows.h"

namespace dspattn::cuda {

std::span<const core::KernelRow> rows() { return sm90::fused_rows(); }

}  // namespace dspattn::cuda
