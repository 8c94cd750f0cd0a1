// The general kernel's rows of the kernel table, one per element type.
#pragma once

#include <span>

#include "core/kernel_row.h"

namespace dspattn::cuda::general {

std::span<const core::KernelRow> general_rows();

}  // namespace dspattn::cuda::general
