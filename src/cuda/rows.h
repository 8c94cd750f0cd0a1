// The GPU kernels' rows of the kernel table, in order of preference. Empty in a build without CUDA.
#pragma once

#include <span>

#include "core/kernel_row.h"

namespace dspattn::cuda {

std::span<const core::KernelRow> rows();

}  // namespace dspattn::cuda
