// TMA's descriptions of tensors.
#pragma once

#include <cuda.h>

#include "cuda/blocks/tma_shapes.h"

namespace dspattn::cuda::blocks {

// Writes the map, with the 128-byte swizzle; fp32 is rounded to tf32 on the way. Throws when the driver refuses.
void encode(CUtensorMap& map, const TmaShape<4>& shape, CUtensorMapDataType type);
void encode(CUtensorMap& map, const TmaShape<5>& shape, CUtensorMapDataType type);

CUtensorMapDataType tma_type(DType type);
// Of mask elements, which are copied as they are.
CUtensorMapDataType tma_type(int element_bytes);

// Writes the map where TMA can address the tensor; returns whether it can.
template <std::size_t kRank, typename Type>
bool make_map(CUtensorMap& map, const std::optional<TmaShape<kRank>>& shape, Type type) {
  if (shape) encode(map, *shape, tma_type(type));
  return shape.has_value();
}

}  // namespace dspattn::cuda::blocks
