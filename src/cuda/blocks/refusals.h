// What several kernels have against a problem in the same words: each names the argument, what is taken, what was
// given.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/geometry.h"
#include "core/kernel_row.h"
#include "cuda/device/facts.h"

namespace dspattn::cuda::blocks {

// `serves`: what the kernel says of a device that is there; `needs`: the compute capability it asks for, in words.
void refuse_device(const DeviceFacts& device, bool serves, std::string_view needs, core::Refusals& refusals);

void refuse_type(DType type, const Problem& problem, core::Refusals& refusals);

// The larger of the head dims: above `above` (0: from 0 on), up to `most`.
void refuse_dims(int above, int most, const core::Geometry& geometry, core::Refusals& refusals);

// Positions in a sequence, in a packed batch and of pages, and sums of them: within 32 bits.
void refuse_rows(const Problem& problem, const core::Geometry& geometry, core::Refusals& refusals);
void refuse_pages(const Problem& problem, core::Refusals& refusals);
void refuse_offset(const Mask& mask, core::Refusals& refusals);

// Of mask tensors, in elements.
void refuse_key_strides(const Mask& mask, std::int64_t most, core::Refusals& refusals);

}  // namespace dspattn::cuda::blocks
