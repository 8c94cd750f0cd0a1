// The fused backward's rows of the kernel table.
#pragma once

#include <span>

#include "core/kernel_row.h"

namespace dspattn::cuda::sm90 {

std::span<const core::KernelRow> fused_backward_rows();

}  // namespace dspattn::cuda::sm90
