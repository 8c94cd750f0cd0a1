// The split-key kernels' rows of the kernel table.
#pragma once

#include <span>

#include "core/kernel_row.h"

namespace dspattn::cuda::decode {

std::span<const core::KernelRow> decode_rows();

}  // namespace dspattn::cuda::decode
