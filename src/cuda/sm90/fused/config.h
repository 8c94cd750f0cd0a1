// Tile sizes, registers and shared memory of the fused kernel, one choice per (head dim, rows per block), with reasons.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/sm90/fused/params.h"
#include "cuda/tile/key_map.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::sm90 {

// The hardware patterns. Both are 2:4 to the tensor core; keep_one_of_two fills a group with two pairs.
enum class Selection : std::uint8_t { two_of_four, one_of_two };

// Each head dim is compiled in up to three variants, because registers are what the kernel is short of:
//   wide     three consumer warpgroups, 192 query rows a block: best for long sequences at small head dims
//   narrow   two, 128 rows: short sequences, larger head dims
//   full     two, in pairs of thread blocks, where every row sees all keys and these are whole blocks: half of the
//            narrow one's code, and less to do between two items (full.h)
//   general  two, and everything the others leave out: mask tensors, tensors that are not 16-byte aligned
enum class Variant : std::uint8_t { wide, narrow, full, general };

// Consumer warpgroups of 64 query rows each share the K and V tiles that one producer warpgroup loads.
template <DType kTypeOfInputs, Selection kSelectionRule, int kDim, Variant kVariant>
struct Config {
  static constexpr DType kType = kTypeOfInputs;
  static constexpr Selection kSelection = kSelectionRule;
  static constexpr int kHeadDim = kDim;
  static constexpr bool kGeneral = kVariant == Variant::general;
  static constexpr bool kFull = kVariant == Variant::full;
  static constexpr int kConsumers = kVariant == Variant::wide ? 3 : 2;
  static constexpr int kTileQ = 64 * kConsumers;
  // Common lengths are no multiple of 192: the last row tile of a head is shorter then (tile/walk.h).
  static constexpr bool kShortLast = kTileQ % 128 != 0;

  // Keys per tile. 128 is a whole block of the interleaved grouping and gives each product enough work. Above d = 128
  // the output accumulator takes d/2 registers a thread and a K or V tile 256 d bytes, so a tile is half a block.
  static constexpr int kTileK = kHeadDim <= 128 ? 128 : 64;
  static constexpr int kTilesPerBlock = tile::kBlockKeys / kTileK;
  static constexpr Pattern kPattern = kSelection == Selection::two_of_four ? Pattern{2, 4} : Pattern{1, 2};
  static constexpr tile::KeyMap kInterleavedKeys = tile::key_map(kPattern, Grouping::interleaved, kTileK);
  static constexpr tile::KeyMap kConsecutiveKeys = tile::key_map(kPattern, Grouping::consecutive, kTileK);

  // Head dims are stored in panels of 64 columns: 128 bytes, one swizzle row.
  static constexpr int kPanels = (kHeadDim + 63) / 64;

  // The launch gives every thread 65536 / threads registers; the producer hands most of its share to the consumers.
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr bool kNarrow = kVariant == Variant::narrow || kFull;
  static constexpr int kProducerRegisters = kNarrow ? 40 : kGeneral ? 88 : 56;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 152 : kGeneral ? 208 : 232;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8),
                "setmaxnreg would wait for ever for registers the launch did not allocate");

  // Q in registers saves reading it from shared memory with every key tile; only the narrow variant up to d = 128 has
  // room for it. Where it stays in shared memory, a second buffer lets the next item's Q arrive early.
  static constexpr bool kQInRegisters = kNarrow && kHeadDim <= 128;
  static constexpr int kQBuffers = kHeadDim <= 64 ? 2 : 1;
  // At d = 256 half of it fits. Q's first panels come through the ring as an item's first entry, in a stage of K beside
  // an empty one of V, and the consumers take them to registers: the place they need no more is a third stage's.
  static constexpr int kQPanelsByRing = kNarrow && kHeadDim == 256 ? 2 : 0;
  static constexpr int kQEntries = kQPanelsByRing > 0 ? 1 : 0;
  // Steps of the score product, 16 columns each, and how many of them read Q from registers.
  static constexpr int kScoreSteps = (kHeadDim + 15) / 16;
  static constexpr int kQSteps = kQInRegisters ? kScoreSteps : 4 * kQPanelsByRing;
  // The producer's four warps: those that bring K and V (separate ones need not wait until one another's places are
  // free), one that brings Q, and assistants (assistant.h). What of Q stays in shared memory those after the first
  // multiply by 2^-e there.
  static constexpr int kTileWarps = kQInRegisters ? 2 : 1;
  static constexpr int kAssistants = 3 - kTileWarps;
  static constexpr int kScalingWarps = 3;
  // The first scores of the next item can be issued before this one's results are written.
  static constexpr bool kChainsItems = kQInRegisters || kQBuffers == 2;
  static_assert(!kChainsItems || kQEntries == 0, "the next item's Q would have to be taken while this one's is in use");

  // Results leave by way of shared memory: the copy engine writes whole lines, and the warps need not wait. Beyond d =
  // 64 there is room for them only where Q was.
  static constexpr bool kStagesOutput = kChainsItems;
  static constexpr bool kOutInPlaceOfQ = kStagesOutput && kHeadDim > 64;

  // Warpgroups issue their products in turn: measured faster but at d = 256, see docs/fused_kernel.md.
  static constexpr bool kTakeTurns = kHeadDim < 256 || kGeneral;

  // An item's blocks of keys may come from the last down to the first. Beyond d = 128 registers are too few.
  static constexpr bool kMayDescend = kHeadDim <= 128;

  // Tiles of which a half is hidden, or only one half needs masking, have code of their own: where it pays most.
  static constexpr bool kSplitsBlocks = kNarrow && kHeadDim == 64;

  static constexpr int kQuarters = kTileK / 64;  // 64 keys share a metadata word
  // Selection runs under the output product of the tile before, whose operands the new weights overwrite: how many
  // units of 32 keys are selected and exponentiated, into spare registers, before waiting for it. Measured
  // (docs/fused_kernel.md): nothing with three warpgroups, 5 % with two.
  static constexpr int kHeldUnits = !kNarrow || kTileK < 128                                 ? 1
                                    : kHeadDim <= 64 && kSelection == Selection::two_of_four ? 3
                                                                                             : 2;

  // Exponentials of two rows at once, in fp16: a weight errs by less than rounding it to bf16 does. 2 to 4 % faster,
  // but nothing for 1:2 at d = 128 (docs/fused_kernel.md), and beyond it registers are too few.
  static constexpr bool kHalfExponentials =
      kType == DType::bf16 && !kGeneral && kHeadDim <= (kSelection == Selection::two_of_four ? 128 : 64);

  // Weights are exponentials relative to a reference, which is a score of an earlier tile and this much (base 2) more.
  // In fp16 arguments near 0 are the precise ones: the reference lies in the middle of where large weights can be.
  static constexpr float kHeadroom = kHalfExponentials ? 3.0f : 0.0f;
  // A lane's sum of a tile's weights past this raises the reference. fp16 weights must stay below 65504; bf16 has
  // fp32's range. Exponentials in fp16: no argument is above 5 then. 8, with a headroom of 2, was passed by one warp in
  // twenty on random inputs, and the kernel took up to twice as long.
  static constexpr float kWeightLimit = kHalfExponentials ? 32.0f : kType == DType::f16 ? 0x1p15f : 0x1p60f;

  // Two thread blocks, on neighbouring multiprocessors, may work on one item of twice as many rows: each brings one of
  // K's and V's two panels for both. The L2 cache's bandwidth is what they save.
  static constexpr bool kPairs = kQInRegisters && kPanels == 2;
  static_assert(!kFull || kPairs, "the full variant is one for pairs");

  // At the barrier that says that an item's Q is there: one for Q, and one for its description, which only items that
  // differ need.
  static constexpr int kQArrivals = kFull ? 1 : 2;

  static constexpr int kPanelQBytes = kTileQ * 128;
  static constexpr int kPanelKBytes = kTileK * 128;
  static constexpr int kTileQBytes = (kPanels - kQPanelsByRing) * kPanelQBytes;  // in a place of their own
  static constexpr int kTileKBytes = kPanels * kPanelKBytes;                     // of V too
  static_assert(kQPanelsByRing * kPanelQBytes <= kTileKBytes, "one entry of the ring has to do");
  static constexpr int kOutBytes = kStagesOutput && !kOutInPlaceOfQ ? kTileQBytes : 0;
  // Mask tensors come to shared memory in blocks (tile/mask_map.h): what is left for them beside two stages at d = 128
  // is four blocks of 16-bit biases, two for each warpgroup; beyond it half as much.
  static constexpr int kMaskBytes = !kGeneral ? 0 : kHeadDim <= 128 ? 64 * 1024 : 32 * 1024;
  // How many blocks of a mask with elements of that size the ring has.
  static constexpr __device__ int mask_slots_log2(int element_bytes) {
    const int of_two_bytes = kMaskBytes == 64 * 1024 ? 2 : 1;
    return element_bytes == 1 ? 2 : element_bytes == 2 ? of_two_bytes : of_two_bytes - 1;
  }

  // As many stages as fit beside Q, results and masks (227 KiB a block, 1 KiB of it for alignment), at most four: more
  // gave nothing.
  static constexpr int kRoom = 227 * 1024 - 1024 - 512 - kQBuffers * kTileQBytes - kOutBytes - kMaskBytes;
  static constexpr int kStages = kRoom / (2 * kTileKBytes) < 4 ? kRoom / (2 * kTileKBytes) : 4;
  static_assert(kStages >= 2, "the producer could not run ahead");
  // Where results have no place of their own, items of one or two tiles do with a stage less, and its V is that place:
  // such items come to their end so often that Q's place would be missed (docs/fused_kernel.md).
  static constexpr bool kSparesStage = !kFull && kOutInPlaceOfQ && kStages == 3 && kTileQ == kTileK;
};

// What one consumer warpgroup has to do for an item, in tiles and blocks counted as they come.
struct Share {
  int begin, end;                    // tiles that any of its rows sees
  int interior_begin, interior_end;  // blocks that need no masking
  int skip_before, skip_after;       // entries of the ring that only other warpgroups need
};

// Who brings an item's last block, when it has fewer than 128 keys (none: it has not): the copy engine, with rows past
// the sequence's end besides, or threads.
enum class Tail : std::int16_t { none, by_engine, by_threads };

// What the producer tells the consumers about an item, and the warps that assist it.
template <int kConsumers>
struct Item {
  int valid;      // 0: no more items
  int row_begin;  // first query row of the tile, within the sequence
  int rows;       // query rows of the sequence; the item's are those from row_begin up to this
  int batch;      // of the output
  int out_row;    // row of the output that holds row row_begin
  int sequence;   // index along the masks' batch dimension
  int head;
  int diagonal;  // of this sequence, see RowBand
  int key_length;
  std::int64_t out_offset;  // elements to row row_begin of the output
  std::int64_t lse_offset;
  Share shares[kConsumers];
  Tail tail;
  std::int16_t common;  // pairs: K and V are the same for both blocks
  int entries;          // of the ring: the tiles of all its blocks, and what of Q comes that way
  int k_row;            // row of K and V that holds the sequence's key 0
  int first_block;      // the one that comes first
};

// A consumer may still write the results of an item whose two successors are already announced; one more is a power
// of 2.
inline constexpr int kItemSlots = 4;

// Blocks of mask tensors for the consumers.
template <int kBytes, int kConsumers>
struct MaskBlocks {
  static constexpr int kSlots = 4;  // at most
  alignas(1024) std::uint8_t blocks[kBytes];
  std::uint64_t full[kConsumers * kSlots], empty[kSlots];
};
template <int kConsumers>
struct MaskBlocks<0, kConsumers> {};

// Full variant: results that the consumers hand to the producer's sender (full.h).
template <typename C, bool kPresent = C::kFull>
struct HandOver {
  std::uint64_t full[C::kConsumers];  // a warpgroup's results are in the place of Q, and its sums here
  float2 sums[C::kTileQ];             // of a row's weights, and minus their reference
};
template <typename C>
struct HandOver<C, false> {};

// Pairs with a schedule: what the first block tells the second to take.
template <typename C, bool kPresent = C::kPairs && !C::kFull>
struct Turn {
  std::uint64_t told, heard;
  int item;
};
template <typename C>
struct Turn<C, false> {};

template <typename C>
struct alignas(1024) Shared {
  std::uint8_t q[C::kQBuffers][C::kTileQBytes];
  std::uint8_t k[C::kStages][C::kTileKBytes];
  std::uint8_t v[C::kStages][C::kTileKBytes];
  [[no_unique_address]] MaskBlocks<C::kMaskBytes, C::kConsumers> mask;
  std::uint8_t out[C::kOutBytes > 0 ? C::kOutBytes : 1];
  // full: the producer's data has arrived; empty: every consumer warpgroup is done with it. q_scaled: Q stays in shared
  // memory and has been multiplied by 2^-e there.
  std::uint64_t q_full[C::kQBuffers], q_scaled[C::kQBuffers], q_empty[C::kQBuffers];
  std::uint64_t k_full[C::kStages], k_empty[C::kStages];
  std::uint64_t v_full[C::kStages], v_empty[C::kStages];
  // Pairs: the other one's consumers are done with it.
  std::uint64_t k_peer_empty[C::kStages], v_peer_empty[C::kStages];
  std::uint64_t tail_begun[C::kStages];   // a tile of a last block is the assistants' to complete
  std::uint64_t described[C::kQBuffers];  // the item is: where those that bring K and V need that (ragged.h)
  Item<C::kConsumers> items[kItemSlots];  // one a q_full, in turn
  [[no_unique_address]] HandOver<C> results;
  [[no_unique_address]] Turn<C> turn;
};

template <typename C>
inline constexpr int kSharedBytes = static_cast<int>(sizeof(Shared<C>)) + 1024;  // the runtime aligns to 16 bytes only

// How many stages are in use.
template <typename C>
__device__ __forceinline__ int stages_of(const FusedParams& params) {
  return C::kSparesStage && params.short_items != 0 ? C::kStages - 1 : C::kStages;
}

// A stage and the parity of its current use; advances round robin.
template <int kStages>
struct Ring {
  int stage = 0;
  int parity = 0;
  __device__ __forceinline__ void advance(int stages = kStages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// In the general variant the producer's last three warps bring mask tensors.
inline constexpr int kMaskWarps = 3;
inline constexpr int kMaskThreads = 32 * kMaskWarps;

// Named barriers (0 is __syncthreads).
inline constexpr int kBarrierProducer = 1;  // the producer's 128 threads, or its assistants
inline constexpr int kBarrierTurn = 2;      // + consumer index: its turn to issue products

}  // namespace dspattn::cuda::sm90
