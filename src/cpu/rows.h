// The CPU kernels' rows of the kernel table, in order of preference.
#pragma once

#include <span>

#include "core/kernel_row.h"

namespace dspattn::cpu {

std::span<const core::KernelRow> rows();

}  // namespace dspattn::cpu
