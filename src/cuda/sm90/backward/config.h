// Tile sizes, registers and shared memory of the fused backward, one choice per head dim, with reasons.
#pragma once

#include <cstdint>

#include "cuda/blocks/selection.h"
#include "cuda/tile/key_map.h"
#include "cuda/tile/key_row_masks.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::sm90::backward {

using blocks::Selection;

// How the two key warpgroups share the work on a query tile.
enum class Split : std::uint8_t {
  keys,      // 64 keys each, everything of them
  products,  // the same 64 keys: one has scores and dV, the other dP and dK
};

inline constexpr int kPartKeys = 64;                                   // rows of an accumulator: keys of one warpgroup
inline constexpr std::uint32_t kBiasBytes = 4 * tile::kBiasWarpBytes;  // of those and a query tile

// What a thread's accumulators take of its registers: scores and dP kTileQ / 2 each, dK and dV kDim / 2 each. Those
// that live at once must stay below about 200:
//   d     query tile x key tile   split      scores + dP + dK + dV
//   64    64 x 128                keys       32 + 32 + 32 + 32
//   128   64 x 128                keys       32 + 32 + 64 + 64
//   192   64 x 64                 products   32 + 0 + 0 + 96, and 0 + 32 + 96 + 0
//   256   64 x 64                 products   32 + 0 + 0 + 128, and 0 + 32 + 128 + 0
template <DType kTypeOfInputs, Selection kSelectionRule, int kDim>
struct Config {
  static constexpr DType kType = kTypeOfInputs;
  static constexpr Selection kSelection = kSelectionRule;
  static constexpr int kHeadDim = kDim;
  static constexpr Split kSplit = kDim <= 128 ? Split::keys : Split::products;
  static constexpr int kConsumers = 2;

  static constexpr int kTileQ = 64;
  static constexpr int kKeys = kSplit == Split::keys ? 2 * kPartKeys : kPartKeys;  // of a CTA's key tile
  static constexpr int kParts = kKeys / kPartKeys;
  static constexpr int kPartsPerBlock = tile::kBlockKeys / kKeys;

  // Columns are stored in panels of 64: 128 bytes, one row of the swizzle.
  static constexpr int kPanels = kDim / 64;
  static constexpr int kPanelQBytes = kTileQ * 128;
  static constexpr int kPanelKBytes = kKeys * 128;  // of K and V, and of dS, whose columns are queries
  static constexpr int kTileQBytes = kPanels * kPanelQBytes;
  static constexpr int kTileKBytes = kPanels * kPanelKBytes;
  static constexpr int kQueryPanels = kTileQ / 64;
  static constexpr int kDScoreBytes = kQueryPanels * kPanelKBytes;
  static constexpr bool kBiasAhead = false;  // see WithBias; here a bias is read from global memory
  static constexpr int kDScoreSlots = kDim <= 64 ? 4 : 2;
  static_assert(kDScoreBytes == kParts * static_cast<int>(kBiasBytes), "a bias takes the place of dS");
  static constexpr int kSteps = kDim / 16;  // of the products over a head dim
  // dQ is computed 64 rows and so many columns at a time, which is what the registers of the query warpgroup hold. Not
  // fewer: warps take turns on the tensor core, a product each, however small it is.
  static constexpr int kSumColumns = 64;
  static constexpr int kSumPasses = kQueryPanels * kDim / kSumColumns;

  // A share is counted while the next step's dQ is computed, when its additions have long arrived. Walks must be two
  // steps apart for that: key tiles of two query tiles.
  static constexpr bool kCountsLater = kKeys == 2 * kTileQ;

  static constexpr bool kScoresAhead = kDim <= 64;
  static constexpr int kStages = kDim <= 64 ? 4 : kDim <= 128 ? 3 : 2;  // of Q and dO
  // Of 2:4 so many pairs of queries are pruned while products run, the others beside exponentials; of 1:2, whose
  // groups do not ask another lane, all of them. By measurement.
  static constexpr int kPrunedAhead = kSelectionRule == Selection::one_of_two ? 0 : kDim <= 64 ? 4 : kTileQ / 8;
  static constexpr int kCopiesOfD = kDim <= 64 ? 2 : 1;  // in shared memory: see TileNumbers
  // Of K and V: where there is room, those of the next item are loaded beside this one's.
  static constexpr int kKeySlots = kDim <= 192 ? 2 : 1;
  static constexpr int kValueSlots = kDim <= 64 ? 2 : 1;

  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kQueryRegisters = 72;
  static constexpr int kKeyRegisters = 216;
  static_assert(kQueryRegisters + kConsumers * kKeyRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8),
                "setmaxnreg would wait for ever for registers the launch did not allocate");
};

// Whether there is a kernel of its own for problems with a bias that can be copied.
constexpr bool has_bias_kernel(int dim) { return dim <= 128; }

// That kernel's choices: every tile has a bias, which two warps of the query warpgroup, those with the least to do,
// copy to where its dS will lie, tiles ahead.
template <typename C>
struct WithBias : C {
  static_assert(has_bias_kernel(C::kHeadDim));
  static constexpr bool kBiasAhead = true;
  // At d = 128 two of the places have the room of a second K.
  static constexpr int kDScoreSlots = 4;
  static constexpr int kKeySlots = C::kHeadDim <= 64 ? C::kKeySlots : 1;
  // When dS of a tile is there, dQ and dK of the one before are computed: its place is free for the bias of the tile
  // that comes this many later.
  static constexpr int kTilesOfBiasAhead = kDScoreSlots - 1;
  static_assert(C::kParts == 2 && kTilesOfBiasAhead >= 2, "a warp a part; scores come a step ahead");
};

}  // namespace dspattn::cuda::sm90::backward
