// Tile sizes, registers and shared memory of the fused backward, one choice per head dim, with reasons.
#pragma once

#include <cstdint>

#include "cuda/blocks/selection.h"
#include "cuda/tile/key_map.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::sm90::backward {

using blocks::Selection;

// The head dims it is compiled for; others are filled up with zeros to the next.
inline constexpr int kHeadDims[] = {64, 128, 256};

// How the two consumer warpgroups share a tile's scores.
enum class Split : std::uint8_t {
  queries,  // 64 query rows each, against all keys of the tile
  keys,     // all 64 query rows, against half of the keys each
};

// What each accumulator takes of a thread's registers: scores and dP kScoreKeys / 2 each, dK and dV kGradientColumns /
// 2 each, dQ kSumColumns / 2, while scores and dP are dead. The four that live at once must stay below about 200:
//   d     query tile x key tile   split     scores + dP + dK + dV
//   64    128 x 128               queries   64 + 64 + 32 + 32
//   128   64 x 128                keys      32 + 32 + 64 + 64
//   256   64 x 64                 keys      16 + 16 + 64 + 64
template <DType kTypeOfInputs, Selection kSelectionRule, int kDim>
struct Config {
  static constexpr DType kType = kTypeOfInputs;
  static constexpr Selection kSelection = kSelectionRule;
  static constexpr Pattern kPattern = blocks::pattern_of(kSelection);
  static constexpr int kHeadDim = kDim;
  static constexpr Split kSplit = kDim <= 64 ? Split::queries : Split::keys;
  static constexpr int kConsumers = 2;

  static constexpr int kTileQ = kSplit == Split::queries ? 128 : 64;
  static constexpr int kKeys = kDim <= 128 ? 128 : 64;  // of a CTA's key tile
  static constexpr int kPartsPerBlock = tile::kBlockKeys / kKeys;
  // Keys of one warpgroup's scores. They lie in K and V as tile/key_map.h has it for a tile of so many keys, one
  // warpgroup's behind the other's; the name is the one blocks/scores16.h goes by.
  static constexpr int kTileK = kSplit == Split::queries ? kKeys : kKeys / 2;

  // dK and dV: of 64 keys each warpgroup has all columns; where the CTA has no more than 64 keys, half of the columns.
  static constexpr bool kSplitsColumns = kKeys == 64;
  static constexpr int kGradientColumns = kSplitsColumns ? kDim / 2 : kDim;
  // dQ: of its own 64 rows each warpgroup has all columns; where both have the same rows, half of the columns.
  static constexpr int kSumColumns = kSplit == Split::queries ? kDim : kDim / 2;

  // Columns are stored in panels of 64: 128 bytes, one row of the swizzle.
  static constexpr int kPanels = kDim / 64;
  static constexpr int kPanelQBytes = kTileQ * 128;  // of Q, dO, and of weights and dS
  static constexpr int kPanelKBytes = kKeys * 128;
  static constexpr int kTileQBytes = kPanels * kPanelQBytes;
  static constexpr int kTileKBytes = kPanels * kPanelKBytes;
  static constexpr int kWeightBytes = kKeys / 64 * kPanelQBytes;
  static constexpr int kSteps = kDim / 16;  // of the products over a head dim

  static constexpr int kStages = 2;  // of Q and dO

  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8),
                "setmaxnreg would wait for ever for registers the launch did not allocate");
};

}  // namespace dspattn::cuda::sm90::backward
