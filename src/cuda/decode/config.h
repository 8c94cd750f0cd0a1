// Sizes of the split-key kernel for few queries, one choice per (type, head dim), and how a CTA's shared memory is laid
// out.
//
// A CTA has teams of one, two or four warps. A team's warps share a ring of key tiles, each with 16 query rows of its
// own; teams take other tiles. So 16, 32 or 64 rows of a key head are served, and loads overlap between teams.
#pragma once

#include <cstdint>

#include "cuda/tile/key_map.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::decode {

inline constexpr int kWarpRows = 16;             // rows of a tensor-core product
inline constexpr int kMaxRows = 4 * kWarpRows;   // of a CTA
inline constexpr int kMostRows = 16 * kMaxRows;  // of a key head: beyond, a kernel for many queries has enough CTAs
inline constexpr int kMaxWarps = 8;              // of a CTA, and teams: a thread has up to 255 registers
inline constexpr int kMaxCluster = 16;           // CTAs
inline constexpr int kPortableCluster = 8;       // CTAs; for more a kernel must say that it may
inline constexpr int kStatsBytes = 16;           // of a row (RowStats)
inline constexpr int kToldBytes = 8;             // of a row (ToldStats)
inline constexpr int kTaggedBytes = 16;          // the same with a tag (ptx/tagged.h)
inline constexpr int kSharedLimit = 227 * 1024;  // a CTA may ask for on Hopper; on Ampere 163 KiB

DSPATTN_HOST_DEVICE constexpr int element_bytes(DType type) { return type == DType::f32 ? 4 : 2; }

// Keys per tile: a K tile of 8 KiB up to rows of 256 bytes, so that the rings of eight teams fit a multiprocessor. Each
// has two tiles or more on their way, 128 KiB together: four times the latency of Hopper's memory times its bandwidth
// (about 29 KB a multiprocessor). The sparse product takes 32 keys at least.
DSPATTN_HOST_DEVICE constexpr int tile_keys(DType type, int dim) { return element_bytes(type) * dim <= 128 ? 64 : 32; }

// Where a warp's scores, selection and weights are in registers alone (weigh16.h): longer rows' results leave too few.
DSPATTN_HOST_DEVICE constexpr bool weighs_in_registers(DType type, int dim) { return type != DType::f32 && dim <= 128; }

// Where heads may choose their keys together: what is compiled (together.h).
constexpr bool chooses_together(DType type, int dim) { return weighs_in_registers(type, dim); }

// Where the weight of pruned keys may be summed (rest = mean): of longer rows registers are too few.
constexpr bool sums_pruned(int dim) { return dim <= 128; }

template <DType kTypeOfInputs, int kDim>
struct Config {
  static constexpr DType kType = kTypeOfInputs;
  static constexpr int kHeadDim = kDim;
  static constexpr int kElementBytes = element_bytes(kType);
  static constexpr int kTileK = tile_keys(kType, kDim);
  static constexpr int kGroups = kTileK / 4;
  static constexpr int kTilesPerBlock = tile::kBlockKeys / kTileK;
  static constexpr int kPanels = kDim * kElementBytes / 128;  // of 128 bytes of columns
  static constexpr bool kSumsPruned = sums_pruned(kDim);
  static_assert(kPanels >= 1 && kDim * kElementBytes % 128 == 0);
};

// What a launch decides: how the warps are teamed, how many rows each has room for, and whether V's rows are gathered.
struct Teams {
  int warps = 1;    // of a team: 1, 2 or 4
  int rows = 16;    // of a warp, rounded up to a power of two: 1, 2, 4, 8 or 16
  int gather = 0;   // 1: only the kept rows of V are read: all rows of a key head keep the same
  int count = 4;    // of a CTA
  int cluster = 1;  // CTAs that send each other their results
  int chosen = 0;   // 1: heads choose together, from scores that are there already
  int lanes = 0;    // 1: of one query and few heads, kept as lanes have them (together_registers.h)
  int stay = 0;     // and of so many tiles a team these stay in shared memory; 0: they are in the workspace
  int scoring = 0;  // 1: these scores are what is computed, of K alone
  int spread = 0;   // 1: and a unit's CTAs are no cluster: they tell each other by the workspace

  DSPATTN_HOST_DEVICE constexpr int cta_warps() const { return warps * count; }
};

// Heads that choose together: tiles that are chosen at once, and whose V is on its way while the next ones are chosen.
// Where lanes choose, as many places for V.
inline constexpr int kChoiceTiles = 2;
inline constexpr int kRowsOfLanes = 8;  // at most, where lanes choose

// Byte offsets in a CTA's shared memory. While keys are walked:
//
//   q        rows of all warps of a team, swizzled (16-bit) or plain (fp32)
//   ring     of every team: K and V tiles (kernel.h); where heads choose, V tiles and scores of the workspace
//   scores   of every warp, where not in registers: [rows][tile keys + 8] fp32, 16 lanes' pairs in different banks
//   weights  of every warp, the same, `buffers` times: [rows][kept keys + 16 bytes], 8 rows in different banks
//   codes    of every warp, where weights are or V is gathered, `buffers` times: [rows][groups] bytes (tile/few_rows.h)
//   kept     of every team, where scores stay, as its lanes have them: [tiles][rows][tile keys] fp16
//
// and at the end, over all of it, every warp's 16 rows of output in fp32; behind both
//
//   stats    of every warp's rows: reference and sums
//   whole    of every row, where heads choose together by the workspace: of all keys
//   told     of every warp of the cluster, where scores stay: reference and sum of its rows, 8 bytes each; of the
//   CTA's,
//            where CTAs tell each other by the workspace
//   sent     of every CTA of a cluster: its rows' stats, and its results of those columns that this CTA joins
//   arrived  two barriers, of what is told and of what is sent
//   touched  two words of every warp (touch_parameters(); whether it has heard of all CTAs)
struct SharedLayout {
  int tile_bytes = 0, v_bytes = 0;
  int ring = 0, ring_bytes = 0;                  // of a team
  int batch_scores = 0, batch_scores_bytes = 0;  // in the ring; of a tile
  int scores = 0, scores_stride = 0, scores_bytes = 0;
  int buffers = 1;
  int weights = 0, weights_stride = 0, weights_bytes = 0;  // of a tile
  int codes = 0, codes_bytes = 0;
  int kept = 0, kept_bytes = 0;  // of a team
  int out_bytes = 0;             // of a warp, from 0 on
  int stats = 0, whole = 0, told = 0;
  int sent = 0, chunks = 0;  // of four columns, that a CTA joins
  int arrived = 0, touched = 0;
  int bytes = 0;
};

DSPATTN_HOST_DEVICE constexpr SharedLayout shared_layout(DType type, int dim, const Teams& teams) {
  const int element = element_bytes(type);
  const int keys = tile_keys(type, dim);
  const int row_bytes = dim * element;
  const int warps = teams.cta_warps();
  SharedLayout s;
  s.tile_bytes = keys * row_bytes;
  s.v_bytes = teams.gather != 0 ? s.tile_bytes / 2 : s.tile_bytes;
  s.batch_scores_bytes = teams.rows * keys * 2;
  s.ring = teams.warps * kWarpRows * row_bytes;
  if (teams.lanes != 0) {
    const int of_v = 2 * kChoiceTiles * s.v_bytes;
    s.ring_bytes = of_v > 2 * s.tile_bytes ? of_v : 2 * s.tile_bytes;
  } else if (teams.chosen != 0) {
    s.batch_scores = 2 * kChoiceTiles * s.v_bytes;
    s.ring_bytes = (s.batch_scores + 2 * kChoiceTiles * s.batch_scores_bytes + 1023) / 1024 * 1024;
    s.buffers = 2 * kChoiceTiles;
  } else if (teams.scoring != 0) {
    s.ring_bytes = 2 * s.tile_bytes;
  } else {
    s.ring_bytes = teams.gather != 0 ? 2 * (s.tile_bytes + s.v_bytes) : 3 * s.tile_bytes;
    s.buffers = teams.gather != 0 ? 2 : 1;
  }
  // Where scores are in registers, so are weights, but those that heads choose by the workspace, and codes where
  // nothing is gathered.
  const bool scored = !weighs_in_registers(type, dim), stored = scored || (teams.chosen != 0 && teams.lanes == 0);
  s.scores = s.ring + teams.count * s.ring_bytes;
  s.scores_stride = 4 * (keys + 8);
  s.scores_bytes = scored ? teams.rows * s.scores_stride : 0;
  s.weights = s.scores + warps * s.scores_bytes;
  s.weights_stride = keys / 2 * element + 16;
  s.weights_bytes = stored ? teams.rows * s.weights_stride : 0;
  s.codes = s.weights + warps * s.buffers * s.weights_bytes;
  s.codes_bytes = stored || teams.gather != 0 ? teams.rows * keys / 4 : 0;
  s.kept = (s.codes + warps * s.buffers * s.codes_bytes + 15) / 16 * 16;
  s.kept_bytes = teams.stay * s.batch_scores_bytes;
  const int walked = s.kept + teams.count * s.kept_bytes;
  s.out_bytes = kWarpRows * dim * 4;
  const int ended = warps * s.out_bytes;
  s.stats = ((walked > ended ? walked : ended) + 15) / 16 * 16;
  s.whole = s.stats + warps * kWarpRows * kStatsBytes;
  s.told = s.whole + (teams.chosen != 0 && teams.lanes == 0 ? kWarpRows * kStatsBytes : 0);
  s.sent = s.told + (teams.stay != 0 ? teams.cluster * teams.count * teams.rows * kToldBytes : 0);
  const int rows = teams.warps * teams.rows;
  s.chunks = (rows * dim / 4 + teams.cluster - 1) / teams.cluster;
  s.arrived = s.sent + (teams.cluster > 1 ? teams.cluster * (rows * kStatsBytes + s.chunks * 16) : 0);
  s.touched = s.arrived + 16;
  s.bytes = s.touched + 2 * 4 * kMaxWarps;
  return s;
}

}  // namespace dspattn::cuda::decode
