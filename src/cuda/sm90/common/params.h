// What the host tells a fused forward kernel: one struct, passed by value, made of the building blocks' parts.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/blocks/masks.h"
#include "cuda/blocks/means_params.h"
#include "cuda/blocks/scales.h"
#include "cuda/blocks/views.h"
#include "cuda/blocks/work_params.h"
#include "cuda/tile/key_map.h"

namespace dspattn::cuda::sm90 {

using namespace blocks;

struct ForwardParams {
  CUtensorMap q_map;    // (column, row, head, batch)
  CUtensorMap k_map;    // (column, element, row, head, batch) or (column, row, head, batch): see blocks/tma_shapes.h
  CUtensorMap v_map;    // as K's
  CUtensorMap out_map;  // (column, row, head, batch)

  RowsView q, k, v;
  OutView out;
  LseView lse;
  MaskParams masks;
  WorkParams work;
  tile::KeyMap keys;
  ScoreScales scales;
  int d = 0;

  // TMA cannot address a tensor whose base or strides are no multiple of 16 bytes: then threads copy.
  int tma_q = 0, tma_k = 0, tma_v = 0, tma_out = 0;
  int vector_q = 0, vector_k = 0, vector_v = 0, vector_out = 0;  // rows are 16-byte aligned: copies of 16 bytes

  // The 16-bit kernel only.
  int overlaps = 0;        // 1: may start while the kernel before still runs, and lets the next one do so
  int short_items = 0;     // every item has one key block, or two
  int partial_blocks = 1;  // 0: no sequence has a last key block of fewer than 128 keys
  // TMA may read past a sequence's end, up to these elements of K and V: the first of the last row.
  std::int64_t last_k = 0, last_v = 0;
  MeansView means;
  std::uint32_t coarse_slope = 0;  // of the scales: tile/coarse_exp2.h
};

}  // namespace dspattn::cuda::sm90
