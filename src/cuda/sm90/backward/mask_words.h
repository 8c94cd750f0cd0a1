// A boolean mask as the fused backward reads it: bits, one word for every thread of a tile (tile/key_row_masks.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/blocks/views.h"
#include "cuda/tile/key_map.h"

namespace dspattn::cuda::sm90::backward {

using blocks::MaskTensor;

struct MaskWordsParams {
  MaskTensor mask;  // bytes, zero = masked
  tile::KeyMap key_map;
  int heads = 1;        // of which there are different ones
  int query_tiles = 1;  // of a head
  int key_blocks = 0;   // of a query tile
  int first_key = 0;    // of the first of them
  int rows = 0, keys = 0;
  int words = 0;            // 1: four neighbouring keys can be read at once
  std::int64_t blocks = 0;  // in all
  std::uint32_t* to = nullptr;
};

void launch_pack_mask(const MaskWordsParams& params, cudaStream_t stream);

}  // namespace dspattn::cuda::sm90::backward
