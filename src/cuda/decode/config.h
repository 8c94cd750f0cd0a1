// Sizes of the split-key kernel for few queries, one choice per (type, head dim), and how a CTA's shared memory is laid
// out.
//
// A CTA has four warps, in teams of one, two or four. A team's warps share a ring of key tiles, each with 16 query rows
// of its own; teams take other tiles. So 16, 32 or 64 rows of a key head are served, and loads overlap between teams.
#pragma once

#include <cstdint>

#include "cuda/tile/key_map.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::decode {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kWarpRows = 16;  // rows of a tensor-core product
inline constexpr int kMaxRows = kWarps * kWarpRows;
inline constexpr int kSharedLimit = 227 * 1024;  // a CTA may ask for on Hopper; on Ampere 163 KiB

DSPATTN_HOST_DEVICE constexpr int element_bytes(DType type) { return type == DType::f32 ? 4 : 2; }

// Keys per tile: a K tile of 8 KiB up to rows of 256 bytes, so that two CTAs of four teams with rings of two K tiles
// and one of V fit a multiprocessor. Eight teams that wait for V have a K tile each on its way, 64 KiB: twice the
// latency of Hopper's memory times its bandwidth (about 29 KB a multiprocessor). The sparse product takes 32 keys at
// least.
DSPATTN_HOST_DEVICE constexpr int tile_keys(DType type, int dim) { return element_bytes(type) * dim <= 128 ? 64 : 32; }

// CTAs of a multiprocessor, where shared memory has room for them: the output takes dim / 2 registers a thread.
constexpr int ctas_by_registers(DType type, int dim) { return type != DType::f32 && dim <= 128 ? 3 : 2; }

// Where heads may choose their keys together: what is compiled (together.h).
constexpr bool chooses_together(DType type, int dim) { return type != DType::f32 && dim <= 128; }

template <DType kTypeOfInputs, int kDim>
struct Config {
  static constexpr DType kType = kTypeOfInputs;
  static constexpr int kHeadDim = kDim;
  static constexpr int kElementBytes = element_bytes(kType);
  static constexpr int kTileK = tile_keys(kType, kDim);
  static constexpr int kGroups = kTileK / 4;
  static constexpr int kTilesPerBlock = tile::kBlockKeys / kTileK;
  static constexpr int kPanels = kDim * kElementBytes / 128;  // of 128 bytes of columns
  static_assert(kPanels >= 1 && kDim * kElementBytes % 128 == 0);
};

// What a launch decides: how the warps are teamed, how many rows each has room for, and whether V's rows are gathered.
struct Teams {
  int warps = 1;   // of a team: 1, 2 or 4
  int rows = 16;   // of a warp, rounded up to a power of two: 1, 2, 4, 8 or 16
  int gather = 0;  // 1: only the kept rows of V are read: all rows of a key head keep the same
  int batch = 0;   // heads that choose together: tiles whose V is asked for at once, from scores that are there already
};

// A team that only waits for V has this many tiles of it on their way.
inline constexpr int kChoiceTiles = 4;

// Byte offsets in a CTA's shared memory. While keys are walked:
//
//   q        rows of all warps of a team, swizzled (16-bit) or plain (fp32)
//   ring     of every team: two K tiles, one V tile
//   scores   of every warp: [rows][tile keys + 8] fp32; the 8 keep 16 lanes' pairs in different banks
//   weights  of every warp: [rows][kept keys + 16 bytes], in the inputs' type; 8 rows in different banks
//   codes    of every warp: [rows][groups] bytes (tile/few_rows.h)
//
// (where scores are there already: a ring of `batch` V tiles and as many tiles of scores, and weights and codes of
// each) and at the end, over all of it, every warp's 16 rows of output in fp32; behind both
//
//   stats    of every warp's rows: reference and sum
struct SharedLayout {
  int tile_bytes = 0, v_bytes = 0;
  int ring = 0, ring_bytes = 0;  // of a team
  int scores = 0, scores_stride = 0, scores_bytes = 0;
  int weights = 0, weights_stride = 0, weights_bytes = 0;  // of a tile
  int codes = 0, codes_bytes = 0;
  int batch = 1;
  int out_bytes = 0;  // of a warp, from 0 on
  int stats = 0;
  int bytes = 0;
};

DSPATTN_HOST_DEVICE constexpr SharedLayout shared_layout(DType type, int dim, const Teams& teams) {
  const int element = element_bytes(type);
  const int keys = tile_keys(type, dim);
  const int row_bytes = dim * element;
  SharedLayout s;
  s.tile_bytes = keys * row_bytes;
  s.v_bytes = teams.gather != 0 ? s.tile_bytes / 2 : s.tile_bytes;
  s.ring = teams.warps * kWarpRows * row_bytes;
  const int batch = teams.batch > 0 ? teams.batch : 1;
  s.ring_bytes = teams.batch > 0 ? batch * (s.v_bytes + teams.rows * keys * 4) : 2 * s.tile_bytes + s.v_bytes;
  s.batch = batch;
  s.scores = s.ring + kWarps / teams.warps * s.ring_bytes;
  s.scores_stride = 4 * (keys + 8);
  s.scores_bytes = teams.rows * s.scores_stride;
  s.weights = s.scores + kWarps * s.scores_bytes;
  s.weights_stride = keys / 2 * element + 16;
  s.weights_bytes = teams.rows * s.weights_stride;
  s.codes = s.weights + kWarps * batch * s.weights_bytes;
  s.codes_bytes = teams.rows * keys / 4;
  const int walked = s.codes + kWarps * batch * s.codes_bytes;
  s.out_bytes = kWarpRows * dim * 4;
  const int ended = kWarps * s.out_bytes;
  s.stats = ((walked > ended ? walked : ended) + 15) / 16 * 16;
  s.bytes = s.stats + kWarps * kWarpRows * 8;
  return s;
}

}  // namespace dspattn::cuda::decode
