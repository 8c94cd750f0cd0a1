// Tile sizes, registers and shared memory of the fused tf32 kernel, one choice per (head dim, variant), with reasons.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/sm90/common/variant.h"
#include "cuda/tile/key_map.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::sm90::tf32 {

// Three warpgroups' accumulators and Q fit up to this head dim; below it they were not tried.
constexpr bool has_wide(int dim) { return dim == 64; }

// Variants as in the 16-bit kernel (sm90/common/variant.h). Consumer warpgroups of 64 query rows each share the K and V
// tiles that one producer warpgroup loads and transposes.
template <int kDim, Variant kVariant>
struct Config {
  static constexpr DType kOutType = DType::f32;
  static constexpr int kHeadDim = kDim;
  static constexpr bool kGeneral = kVariant == Variant::general;
  // Every operand is twice as wide as in the 16-bit kernel: at d = 256 shared memory holds 64 query rows.
  static constexpr int kConsumers = kVariant == Variant::wide ? 3 : kHeadDim <= 192 ? 2 : 1;
  static constexpr int kTileQ = 64 * kConsumers;
  static constexpr bool kShortLast = kTileQ % 128 != 0;  // as in the 16-bit kernel

  // Keys per tile: half a block of the interleaved grouping. A 64 x 64 tile takes the tensor core as long as a 64 x 128
  // one of 16-bit types. Larger head dims take quarters: two stages of K and V must fit beside Q, and the general
  // variant needs registers for reading masks.
  static constexpr int kTileK = kHeadDim <= 96 || (kHeadDim <= 128 && !kGeneral) ? 64 : 32;
  static constexpr int kQEntries = 0;  // none of Q goes through the ring
  static constexpr int kQBuffers = 1;
  static constexpr bool kPairs = false;  // no CTAs that share their loads
  static constexpr bool kMayDescend = false;
  static constexpr bool kSparesStage = false;
  static constexpr int kTilesPerBlock = tile::kBlockKeys / kTileK;

  // Head dims are stored in panels of 32 columns, V transposed in panels of 32 keys: 128 bytes, one swizzle row.
  static constexpr int kPanels = kHeadDim / 32;

  // The launch gives every thread 65536 / threads registers; the producer hands some of its share to the consumers.
  // With one consumer warpgroup everyone has as many as a thread can have.
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr bool kMovesRegisters = kConsumers > 1;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 80 : kGeneral ? 104 : kHeadDim == 128 ? 72 : 88;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 144 : kGeneral ? 200 : kHeadDim == 128 ? 216 : 208;
  static_assert(!kMovesRegisters || kProducerRegisters + kConsumers * kConsumerRegisters <=
                                        (kConsumers + 1) * (65536 / kThreads / 8 * 8),
                "setmaxnreg would wait for ever for registers the launch did not allocate");

  // Q in registers halves what the score product reads from shared memory; beyond d = 128 there is no room for it.
  static constexpr bool kQInRegisters = kHeadDim <= 128;
  static constexpr bool kQIsScaledInPlace = false;   // scores are compared as they are
  static constexpr bool kPingPong = kConsumers > 1;  // warpgroups issue their products one after the other

  static constexpr bool kHalfExponentials = false;
  static constexpr bool kReferenceIsScore = true;  // not yet times the scale
  static constexpr float kHeadroom = 0;
  // A lane's sum of a tile's weights past this raises the reference that weights are relative to.
  static constexpr float kWeightLimit = 0x1p60f;

  static constexpr int kPanelQBytes = kTileQ * 128;
  static constexpr int kPanelKBytes = kTileK * 128;
  static constexpr int kTileQBytes = kPanels * kPanelQBytes;
  static constexpr int kTileKBytes = kPanels * kPanelKBytes;  // of V too
  static constexpr int kPanelVBytes = kHeadDim * 128;
  // V passes through shared memory twice: as TMA loads it (raw), and transposed. As many stages of K and transposed V
  // as fit beside Q and raw V (227 KiB a block, 1 KiB of it for alignment), at most four; two raw stages where two
  // stages are left then.
  static constexpr int kRoom = 227 * 1024 - 1024 - 1024 - kTileQBytes;
  static constexpr int kRawStages = kRoom >= 6 * kTileKBytes ? 2 : 1;
  static constexpr int kStagesThatFit = (kRoom / kTileKBytes - kRawStages) / 2;
  static constexpr int kStages = kStagesThatFit < 4 ? kStagesThatFit : 4;
  static_assert(kStages >= 2, "the producer could not run ahead");

  // A producer warp transposes V in patches of 16 keys x 32 columns.
  static constexpr int kPatches = kTileK / 16 * kPanels / 4;  // of one warp, per tile
  static_assert(kPatches * 4 == kTileK / 16 * kPanels);
};

}  // namespace dspattn::cuda::sm90::tf32
