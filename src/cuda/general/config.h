// Shapes of the general kernel, per element type, kind of products and head dim.
#pragma once

#include <cstdint>

#include "cuda/blocks/selection.h"
#include "cuda/tile/key_tiles.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::general {

// How weights meet V, and in what scores are computed:
//   fours    16-bit, 2:4 and 1:2: sparse tensor cores
//   pairs    fp32, 1:2, in tf32: sparse tensor cores
//   any      any pattern, and dense: tensor cores, pruned weights are zeros; fp32 in tf32
//   precise  the same in full fp32, without tensor cores
enum class Kind : std::uint8_t { fours, pairs, any, precise };

constexpr tile::TileLayout layout_of(Kind kind) {
  return kind == Kind::fours   ? tile::TileLayout::fours
         : kind == Kind::pairs ? tile::TileLayout::pairs
                               : tile::TileLayout::places;
}

// How much of the contract an instance serves:
//   plain  scores, masks, a pattern, sinks, pages
//   all    also soft caps, dropout, means of V for what is pruned, heads that choose together, d past 256. It needs
//          registers, and so has one block of 16 rows a warp. Of `any` and `precise`, which serve every pattern.
//   brief  what plain has, in a shape for few keys: 16 rows a warp, and a fourth CTA a multiprocessor. 16-bit at d =
//   64,
//          where the plan prefers it.
enum class Scope : std::uint8_t { plain, all, brief };

// The head dims it is compiled for; others are filled up with zeros to the next.
inline constexpr int kDims[] = {64, 128, 256, 512};
constexpr bool compiled_at(Scope scope, int dim) {
  return scope == Scope::all ? dim >= 128 : scope == Scope::brief ? dim == 64 : dim <= 256;
}
constexpr bool compiled_for(Scope scope, DType type, Kind kind) {
  return scope == Scope::all     ? kind == Kind::any || kind == Kind::precise
         : scope == Scope::brief ? type != DType::f32
                                 : true;
}
// Columns of the output that a CTA computes: those of 16 rows take half as many registers a lane. Wider outputs are
// shared out over CTAs, each of which computes the scores. fp32 at d = 512 has no registers for more than 128.
constexpr int out_columns(DType type, int dim) { return dim <= 256 ? dim : type == DType::f32 ? 128 : 256; }

inline constexpr int kCopyingThreads = 128;

inline constexpr int kMostTileRows = 64;  // where everything is served

template <DType kElementType, Kind kProducts, int kDim, Scope kScope>
struct Config {
  static constexpr bool kAll = kScope == Scope::all;
  static constexpr bool kBrief = kScope == Scope::brief;
  static constexpr DType kType = kElementType;
  static constexpr Kind kKind = kProducts;
  static constexpr tile::TileLayout kLayout = layout_of(kKind);
  static constexpr int kScoreDim = kDim;                     // columns of Q and K
  static constexpr int kHeadDim = out_columns(kType, kDim);  // of V and of the output
  static constexpr int kElementBytes = kType == DType::f32 ? 4 : 2;
  static constexpr bool kIsFp32 = kType == DType::f32;
  static constexpr bool kIsTf32 = kIsFp32 && kKind != Kind::precise;
  static constexpr bool kSplitsColumns = kIsFp32 && kKind == Kind::any;  // order of V's rows: tile/key_tiles.h

  // A warp owns 16 query rows, or twice 16: each fragment of K and V that it reads from shared memory, whose bandwidth
  // is what mma.sync lacks first, then serves two products. At d = 256 the output alone takes half of the registers.
  static constexpr int kRowBlocks = kDim <= 128 && !kAll && !kBrief ? 2 : 1;
  static constexpr bool kNarrow = !kIsFp32 && kDim == 64 && !kAll;
  static constexpr int kNarrowTileK = 64;
  static constexpr int kTileK = (kIsFp32 && kDim > 64) || kDim > 256 ? 32 : kNarrow ? kNarrowTileK : 64;
  // fp32 at d = 512: what fits into 99 KiB.
  static constexpr int kWarps = kIsFp32 && kDim > 256 ? 1 : 4;
  // fp32 at d = 256, where a card has the shared memory for it: twice as many, so that K and V come half as often.
  static constexpr int kMostWarps = kIsFp32 && kDim == 256 && !kAll ? 8 : kWarps;
  static constexpr int kMostThreads = 32 * kMostWarps;
  static constexpr int kWarpRows = 16 * kRowBlocks;
  static constexpr int kTileQ = kWarpRows * kWarps;
  static_assert(!kAll || (kTileQ <= kMostTileRows && kMostThreads == 2 * kTileQ));
  // 16-bit at d = 64: a third CTA a multiprocessor, of 168 registers a thread, hides some of the others' waits. For
  // that scores of half a tile's columns are in registers at once; packed, they take half. A fourth, with half as many
  // rows a warp, is slower wherever rows see many keys.
  static constexpr int kCtas = kBrief ? 4 : kNarrow ? 3 : 2;  // a multiprocessor, as far as registers go
  static constexpr int kScoreParts = kNarrow && !kBrief ? 2 : 1;
  static constexpr int kPartColumns = kTileK / kScoreParts;
  // Scores that nothing is masked of are computed and packed in one straight piece of code.
  static constexpr bool kStraightScores = kNarrow && kCtas == 2;
  // A lane's addresses, and bounds of the walk, stay in registers; elsewhere they are computed, or read from shared
  // memory, where they are needed. Then there are two stages on every card.
  static constexpr bool kKeepsAddresses = kNarrow;

  // Rows are stored in panels of 128 bytes, one swizzle row; V of fp32, which no ldmatrix transposes, row by row, 8
  // floats further apart than they are wide, so that the rows of a quad's lanes lie in different banks.
  static constexpr int kRowBytes = kScoreDim * kElementBytes;
  static constexpr int kPanels = kRowBytes / 128;
  static constexpr int kVPanels = kHeadDim * kElementBytes / 128;
  static constexpr int kScoreSteps = kRowBytes / 32;
  static constexpr int kPanelQBytes = kWarpRows * 128;  // Q of one warp after the other's
  static constexpr int kPanelKBytes = kTileK * 128;
  static constexpr int kVRowBytes = kVPanels * 128 + 32;
  static constexpr int kWarpQBytes = kPanels * kPanelQBytes;
  static constexpr int kKBytes = kPanels * kPanelKBytes;
  static constexpr int kVBytes = kIsFp32 ? kTileK * kVRowBytes : kVPanels * kPanelKBytes;
  // Where the next tile is to be found is remembered, in shared memory or in registers.
  static constexpr bool kCheapCopies = !kIsFp32 && kDim <= 128 && !kAll;
  // A CTA takes one tile of rows after the other, and asks for the first keys and the rows of the next before it ends
  // one (Loader::ask_next).
  static constexpr bool kTakesItems = kCheapCopies && !kKeepsAddresses;  // at d = 64 it takes registers, and loses
  static constexpr int kItemSlots = kTakesItems ? 2 : 1;                 // the item, and the next
  // Two neighbouring warps share the output of both their rows: each computes half of its columns, so that a fragment
  // of V serves 32 rows. For that they exchange weights, in shared memory, with every tile.
  static constexpr bool kSharesOutput = kIsTf32 && kDim == 256 && !kAll;
  static constexpr int kOutBlocks = kSharesOutput ? 2 : kRowBlocks;            // of 16 rows: the warp's own come first
  static constexpr int kOutColumns = kSharesOutput ? kHeadDim / 2 : kHeadDim;  // of a warp
  // Where nothing is selected scores stay in fp32, which with 128 columns of output of 32 rows takes too many
  // registers.
  static constexpr bool kWeighsUnselected = kKind == Kind::any && !kIsFp32 && !kAll && kDim == 256;
  // tf32: K and V are rounded as fragments are read, by every warp, or in shared memory, once for all of them. At d =
  // 256 every warp has less to wait for so, though it has half as many instructions again.
  static constexpr bool kRoundsFragments = kIsTf32 && kDim == 256;
  // One stage: the next K is asked for as soon as all have left this one, for which registers must suffice.
  static constexpr bool kAsksEarly = kKind == Kind::precise && kDim == 256 && !kAll;

  // Beside these: the description of the CTA's rows, and addresses (item.h).
  static constexpr int kOwnBytes = kCheapCopies && !kKeepsAddresses ? 3072 : kAll ? 2048 : 1024;
  // No stage: K and V take turns in one place.
  static constexpr int key_bytes(int stages) {
    return stages == 0 ? (kKBytes > kVBytes ? kKBytes : kVBytes) : stages * (kKBytes + kVBytes);
  }
  // Behind them, where they do not take turns: what a warp gives its neighbour.
  static constexpr int kGivenBytes = kSharesOutput ? (kTileK / (kKind == Kind::pairs ? 4 : 2) + 4) * 32 * 4 : 0;
  static constexpr int kLeastStages = kRowBytes >= 1024 ? 0 : kKeepsAddresses ? 2 : 1;
  static_assert(kWarps * kWarpQBytes + key_bytes(kLeastStages) + kOwnBytes <= 99 * 1024,
                "must fit where a CTA has 99 KiB");

  // Words of a lane's weights for 16 rows, and of metadata.
  static constexpr int kWeights = kKind == Kind::fours              ? kTileK / 8
                                  : kIsFp32 && kKind != Kind::pairs ? kTileK / 2
                                                                    : kTileK / 4;
  static constexpr int kMetadata = kKind == Kind::fours ? kTileK / 64 : kKind == Kind::pairs ? kTileK / 32 : 1;

  // What the building blocks ask (blocks/weigh16.h, sink.h, work.h).
  static constexpr bool kRestMean = false;
  static constexpr int kConsumers = 1;
  static constexpr bool kGeneral = true;
  static constexpr bool kPairs = false;
  static constexpr int kHeldSlices = 1;
  static constexpr bool kHalfExponentials = false;
  static constexpr bool kSumsByOutput = false;
  static constexpr float kHeadroom = 0;
  static constexpr bool kReferenceIsScore = kIsFp32;
  static constexpr DType kOutType = kType;
  // A lane's sum of a tile's weights past this raises the reference. fp16 weights must stay below 65504; bf16 has
  // fp32's range.
  static constexpr float kWeightLimit = kType == DType::f16 ? 0x1p15f : 0x1p60f;
  // The same of a weight, where a tile's largest score is known before it is weighed. fp32: what a later tile's largest
  // leaves of a weight, 2^-90 of it and more, shows (src/check), so that what a reference is raised by, these 90 and
  // the limit, must be an exponent of fp32.
  static constexpr float kLargestWeightLog2 = kType == DType::f16 ? 10.0f : 30.0f;
};

// The same for one of the two patterns that `fours` serves.
template <typename C, blocks::Selection kSelected>
struct Selecting : C {
  static constexpr blocks::Selection kSelection = kSelected;
  static constexpr Pattern kPattern = blocks::pattern_of(kSelected);
};
// The same for copies of V.
template <typename C>
struct OfV : C {
  static constexpr int kPanels = C::kVPanels;
};
// The same for the columns of the output that a warp has.
template <typename C>
struct OfWarp : C {
  static constexpr int kHeadDim = C::kOutColumns;
};

}  // namespace dspattn::cuda::general
