// Tile sizes, registers and shared memory of the fused kernel, one choice per (head dim, variant), with reasons.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/blocks/selection.h"
#include "cuda/sm90/common/variant.h"
#include "cuda/tile/key_map.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::sm90 {

using blocks::Selection;

// Beyond this head dim three warpgroups' accumulators do not fit; below it nobody measured.
constexpr bool has_wide(int dim) { return dim == 64; }
// Where CTAs can work in pairs.
constexpr bool has_full(int dim) { return dim == 96 || dim == 128; }

// With rest = mean: what is worth its compile time.
constexpr bool has_mean_wide(DType type, int dim) { return has_wide(dim) && type == DType::bf16; }
constexpr bool has_mean_full(DType type, int dim) { return dim == 128 && type == DType::bf16; }

// Consumer warpgroups of 64 query rows each share the K and V tiles that one producer warpgroup loads.
template <DType kTypeOfInputs, Selection kSelectionRule, int kDim, Build kBuild>
struct Config {
  static constexpr Variant kVariant = kBuild.variant;
  static constexpr DType kType = kTypeOfInputs;
  static constexpr DType kOutType = kTypeOfInputs;
  static constexpr Selection kSelection = kSelectionRule;
  static constexpr int kHeadDim = kDim;
  static constexpr bool kGeneral = kVariant == Variant::general;
  static constexpr bool kFull = kVariant == Variant::full;
  // The weight of pruned keys is summed too and goes to a mean of V (docs/rest.md).
  static constexpr bool kRestMean = kBuild.rest_mean;
  static constexpr int kConsumers = kVariant == Variant::wide ? 3 : 2;
  static constexpr int kTileQ = 64 * kConsumers;
  // Common lengths are no multiple of 192: the last row tile of a head is shorter then (tile/walk.h).
  static constexpr bool kShortLast = kTileQ % 128 != 0;

  // Keys per tile. 128 is a whole block of the interleaved grouping and gives each product enough work. Above d = 128
  // the output accumulator takes d/2 registers a thread and a K or V tile 256 d bytes, so a tile is half a block.
  // fp16 with rest = mean takes twice as many exponentials in fp32, for which registers would be too few.
  static constexpr int kTileK = kHeadDim > 128 || (kRestMean && kType == DType::f16) ? 64 : 128;
  static constexpr int kTilesPerBlock = tile::kBlockKeys / kTileK;
  // Means of V over a sequence's first keys are added up from their tile (blocks/first_means.h), which has to hold all
  // of them. The full variant has no such rows, and the wide one no registers.
  static constexpr bool kSumsFirstKeys =
#ifdef V_NOFIRST
  false &&
#endif
  kRestMean && kVariant == Variant::narrow && kTilesPerBlock == 1;
  static constexpr Pattern kPattern = blocks::pattern_of(kSelection);
  static constexpr tile::KeyMap kInterleavedKeys = tile::key_map(kPattern, Grouping::interleaved, kTileK);
  static constexpr tile::KeyMap kConsecutiveKeys = tile::key_map(kPattern, Grouping::consecutive, kTileK);

  // Head dims are stored in panels of 64 columns: 128 bytes, one swizzle row.
  static constexpr int kPanels = (kHeadDim + 63) / 64;

  // The launch gives every thread 65536 / threads registers; the producer hands most of its share to the consumers.
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr bool kNarrow = kVariant == Variant::narrow || kFull;
  static constexpr int kProducerRegisters = kNarrow ? 40 : kGeneral ? 88 : kRestMean ? 32 : 56;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? (kRestMean ? 160 : 152) : kGeneral ? 208 : 232;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8),
                "setmaxnreg would wait for ever for registers the launch did not allocate");

  // Q in registers saves reading it from shared memory with every key tile; only the narrow variant up to d = 128 has
  // room for it. Where it stays in shared memory, a second buffer lets the next item's Q arrive early.
  static constexpr bool kQInRegisters = kNarrow && kHeadDim <= 128;
  static constexpr int kQBuffers = kHeadDim <= 64 ? 2 : 1;
  static constexpr bool kQIsScaledInPlace = !kQInRegisters;
  // At d = 256 half of it fits. Q's first panels go through the ring as an item's first entry, in a stage of K beside
  // an empty one of V, and the consumers take them to registers: the room this saves is a third stage's.
  static constexpr int kQPanelsByRing = kNarrow && kHeadDim == 256 && !kRestMean ? 2 : 0;
  static constexpr int kQEntries = kQPanelsByRing > 0 ? 1 : 0;
  // Steps of the score product, 16 columns each, and how many of them read Q from registers.
  static constexpr int kScoreSteps = (kHeadDim + 15) / 16;
  static constexpr int kQSteps = kQInRegisters ? kScoreSteps : 4 * kQPanelsByRing;
  // The producer's four warps: those that load K and V (separate ones need not wait until one another's stages are
  // free), one that loads Q, and warps that complete tails (complete_tails.h). What of Q stays in shared memory those
  // after the first multiply by 2^-e there.
  static constexpr int kTileWarps = kQInRegisters ? 2 : 1;
  static constexpr int kTailWarps = 3 - kTileWarps;
  static constexpr int kScalingWarps = 3;
  // The first scores of the next item can be issued before this one's results are written.
  static constexpr bool kChainsItems = kQInRegisters || kQBuffers == 2;
  static_assert(!kChainsItems || kQEntries == 0, "the next item's Q would have to be taken while this one's is in use");

  // Results leave by way of shared memory: TMA writes whole lines, and the warps need not wait. Beyond d = 64 there is
  // room for them only where Q was.
  static constexpr bool kStagesOutput = kChainsItems;
  static constexpr bool kOutReusesQ = kStagesOutput && kHeadDim > 64;

  // Warpgroups issue their products one after the other: measured faster but at d = 256 (docs/log/forward.md).
  static constexpr bool kPingPong = kHeadDim < 256 || kGeneral;

  // An item's key blocks may be loaded from the last down to the first. Beyond d = 128 registers are too few.
  static constexpr bool kMayDescend = kHeadDim <= 128;

  // Tiles of which a half is hidden, or only one half needs masking, have code of their own: where it pays most.
  static constexpr bool kSplitsBlocks = kNarrow && kHeadDim == 64
#ifdef V_NOSPLIT
 && !kRestMean
#endif
;

  static constexpr int kQuarters = kTileK / 64;  // 64 keys share a metadata word
  // Exponentials of two rows at once, in fp16: a weight errs by less than rounding it to bf16 does. 2 to 4 % faster,
  // but nothing for 1:2 at d = 128 (docs/log/forward.md), and beyond it registers are too few.
  // With twice as many exponentials, as rest = mean has them, 1:2 takes them so at d = 128 too.
  static constexpr bool kHalfExponentials =
      kType == DType::bf16 && !kGeneral && kHeadDim <= (kSelection == Selection::two_of_four || kRestMean ? 128 : 64);

  // A tile's kept weights are added up by the tensor core, where it is idle enough: two warpgroups, the small head dim,
  // and with rest = mean the longest way from scores to weights. The limit is then one of a quarter of the quad's sum:
  // a kept weight may be 2^7, where steps of fp16 are those at 5, and a pruned one, of four, half of that.
  static constexpr bool kSumsByProduct =
      kRestMean && kHalfExponentials && kNarrow && kHeadDim == 64 && kSelection == Selection::two_of_four;

  // References are nowhere else than in what the main loop needs of them (CoarseState of blocks/rest16.h): where two
  // registers more would be spilled.
  static constexpr bool kHoldsReferences =
      kRestMean && kHalfExponentials && kConsumers == 3 && kSelection == Selection::two_of_four;

  // Selection runs under the output product of the tile before, whose operands the new weights overwrite: how many
  // slices of 32 keys are selected and exponentiated, into spare registers, before waiting for it. Measured
  // (docs/log/forward.md): nothing with three warpgroups, 5 % with two.
  static constexpr int kHeldSlices = !kNarrow || kTileK < 128                                 ? 1
                                     : kHeadDim <= 64 && kSelection == Selection::two_of_four ? 3
                                                                                              : 2;

  static constexpr bool kReferenceIsScore = false;  // references are logarithms, base 2
  // Weights are exponentials relative to a reference, which is a score of an earlier tile and this much (base 2) more.
  // In fp16 arguments near 0 are the precise ones: the reference lies in the middle of where large weights can be.
  static constexpr float kHeadroom = kHalfExponentials ? 3.0f : 0.0f;
  // A lane's sum of a tile's weights past this raises the reference. fp16 weights must stay below 65504; bf16 has
  // fp32's range. Exponentials in fp16: no argument is above 5 then. 8, with a headroom of 2, was passed by one warp in
  // twenty on random inputs, and the kernel took up to twice as long.
  static constexpr float kWeightLimit = kHalfExponentials ? 32.0f : kType == DType::f16 ? 0x1p15f : 0x1p60f;

  // Two CTAs, on neighbouring multiprocessors, may work on one item of twice as many rows: each loads one of K's and
  // V's two panels for both. The L2 cache's bandwidth is what they save.
  static constexpr bool kPairs = kQInRegisters && kPanels == 2;
  static_assert(!kFull || kPairs, "the full variant is one for pairs");

  // At the barrier that says that an item's Q is there: one for Q, and one for its description, which only items that
  // differ need.
  static constexpr int kQArrivals = kFull ? 1 : 2;

  static constexpr int kPanelQBytes = kTileQ * 128;
  static constexpr int kPanelKBytes = kTileK * 128;
  static constexpr int kTileQBytes = (kPanels - kQPanelsByRing) * kPanelQBytes;  // in a buffer of their own
  static constexpr int kTileKBytes = kPanels * kPanelKBytes;                     // of V too
  static_assert(kQPanelsByRing * kPanelQBytes <= kTileKBytes, "one entry of the ring has to do");
  static constexpr int kOutBytes = kStagesOutput && !kOutReusesQ ? kTileQBytes : 0;
  // Mask tensors are loaded to shared memory in blocks (tile/mask_map.h): what is left for them beside two stages at d
  // = 128 is four blocks of 16-bit biases, two for each warpgroup; beyond it half as much.
  static constexpr int kMaskBytes = !kGeneral ? 0 : kHeadDim <= 128 ? 64 * 1024 : 32 * 1024;
  // How many blocks of a mask with elements of that size the ring has.
  DSPATTN_HOST_DEVICE static constexpr int mask_slots_log2(int element_bytes) {
    const int of_two_bytes = kMaskBytes == 64 * 1024 ? 2 : 1;
    return element_bytes == 1 ? 2 : element_bytes == 2 ? of_two_bytes : of_two_bytes - 1;
  }

  // As many stages as fit beside Q, results and masks (227 KiB a block, 1 KiB of it for alignment), at most four: more
  // gave nothing.
  static constexpr int kRoom = 227 * 1024 - 1024 - 512 - kQBuffers * kTileQBytes - kOutBytes - kMaskBytes;
  static constexpr int kStages = kRoom / (2 * kTileKBytes) < 4 ? kRoom / (2 * kTileKBytes) : 4;
  static_assert(kStages >= 2, "the producer could not run ahead");
  // Where results have no buffer of their own, items of one or two tiles do with a stage less, and its V is that
  // buffer: such items end so often that Q's buffer would be missed (docs/log/forward.md).
  static constexpr bool kSparesStage = !kFull && kOutReusesQ && kStages == 3 && kTileQ == kTileK;
};

}  // namespace dspattn::cuda::sm90
