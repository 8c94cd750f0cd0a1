// Shapes of the general backward's two kernels, per element type, kind of products and head dim.
//
// Scores are made in tiles of 32 keys: the widest group there is. Rows of Q, dO, K and V lie in shared memory as in the
// workspace, 16 bytes further apart than they are long: eight rows' equal chunks are then in different banks, and so
// are neighbouring rows' words of a quad, whichever way a fragment is read.
#pragma once

#include <cstdint>

#include "cuda/general/config.h"
#include "cuda/tile/key_tiles.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::general::backward {

// The head dims it is compiled for; others are filled up with zeros to the next.
inline constexpr int kBackwardDims[] = {64, 128, 256, 512};

// Which problems a key-stationary kernel is compiled for.
enum class Features : std::int32_t {
  plain,  // 16-bit inputs, groups of 2, 4, ... 32 keys, masked by diagonal, window and lengths alone
  all,
};

// Not every combination is worth compiling: small head dims with features, and full fp32, are filled up to 128.
constexpr bool compiled_at(DType type, Kind kind, Features features, int dim) {
  if (features == Features::plain) return type != DType::f32 && dim <= 128;
  return dim > 64 || (type == DType::f32 && kind == Kind::any);
}

// Query rows of a head lie in the workspace in units of so many: a multiple of every tile.
inline constexpr int kRowUnit = 128;
// Key tiles of a head in units of so many: a multiple of what a CTA takes, and an interleaved block.
inline constexpr int kTileUnit = 4;

// Static shared memory of a CTA of the key-stationary kernel, at most: what it works on (key_kernel.h).
inline constexpr int kDescriptionBytes = 1024;

// kKind: any or precise (general/config.h).
template <DType kElementType, Kind kProducts, int kDim, Features kServed = Features::all>
struct Config {
  static_assert(kProducts == Kind::any || kProducts == Kind::precise);
  static constexpr DType kType = kElementType;
  static constexpr Kind kKind = kProducts;
  static constexpr tile::TileLayout kLayout = tile::TileLayout::places;
  static constexpr int kHeadDim = kDim;
  static constexpr bool kPlain = kServed == Features::plain;
  // Keys are the rows of scores: a warp's weights and dS are operands in its registers (key_rows_kernel.h).
  static constexpr bool kKeyRows = kPlain && kHeadDim == 64;
  static constexpr int kElementBytes = kType == DType::f32 ? 4 : 2;
  static constexpr bool kIsFp32 = kType == DType::f32;
  static constexpr bool kIsTf32 = kIsFp32 && kKind != Kind::precise;
  static constexpr int kTileK = 32;
  static constexpr int kRowBytes = kHeadDim * kElementBytes;
  static constexpr int kStride = kRowBytes + 16;
  static constexpr int kKeysBytes = 2 * kTileK * kStride;  // of a tile: K, then V
  static constexpr int kNumberBytes = 16;                  // of a row: RowNumbers

  // Where a CTA has 99 KiB of shared memory; fp32 past d = 256 needs twice as much.
  static constexpr int kSmallestShared = (kRowBytes <= 1024 ? 99 : 200) * 1024 - kDescriptionBytes;

  // dQ and the gradient of a bias: a CTA owns query rows, a warp 16 or twice 16 of them, and all columns of dQ or, for
  // want of registers, some.
  struct Queries {
    static constexpr int kColumns = kHeadDim <= 256 ? kHeadDim : 256;
    static constexpr int kColumnParts = kHeadDim / kColumns;
    static constexpr int kRowBlocks = 1;
    static constexpr int kWarps = kRowBytes <= 256 ? 4 : kRowBytes == 512 ? 2 : 1;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kCtas = kRowBytes <= 128 ? 4 : kRowBytes == 256 ? 3 : 2;  // a multiprocessor: registers
    static constexpr int kTileQ = 16 * kRowBlocks * kWarps;
    static constexpr int kRowsBytes = kTileQ * (2 * kStride + kNumberBytes);
    static constexpr int shared_bytes(int stages) { return kRowsBytes + stages * kKeysBytes; }
    static_assert(kRowUnit % kTileQ == 0);
    static_assert(shared_bytes(1) <= kSmallestShared);
  };

  // dK, dV and shares of dQ: a CTA owns key tiles, up to kMaxTiles as the plan says. kSplit warps share one: each makes
  // the scores of a part of the query rows, if there are enough for it, and each has a part of the gradients' columns.
  struct Keys {
    static constexpr int kMaxTiles = kRowBytes > 256 ? 1 : kIsFp32 ? 2 : 4;
    static constexpr int kSplit = kRowBytes <= 256 ? 2 : kHeadDim <= 256 ? 4 : 8;
    static constexpr int kMaxThreads = 32 * kMaxTiles * kSplit;
    static constexpr int kCtas = kMaxTiles * kSplit <= 4 ? 2 : 1;  // a multiprocessor: 255 registers
    static constexpr int kRowBlocks = kRowBytes <= 256 && !kIsFp32 ? 2 : 1;
    static constexpr int kTileQ = kRowBytes <= 256 && !kIsFp32 ? 64 : kRowBytes >= 1024 ? 16 : 32;
    static constexpr int kRowWarps = kTileQ / (16 * kRowBlocks);              // of the kSplit
    static constexpr int kColumns = kKeyRows ? kHeadDim : kHeadDim / kSplit;  // of a warp
    static_assert(kRowWarps <= kSplit && kRowUnit % kTileQ == 0 && kTileUnit % kMaxTiles == 0);

    // Weights and dS of a key tile, [query row][key]: rows as far apart as keeps banks different.
    // Where keys are rows there is dS alone, [key][query row], twice.
    static constexpr int kWeightStride = kIsFp32 ? 4 * (kTileK + 4) : 2 * ((kKeyRows ? kTileQ : kTileK) + 8);
    static constexpr int kWeightBytes = (kKeyRows ? kTileK : kTileQ) * kWeightStride;
    // fp32 at d = 256, and d = 512: they take the places of K and V, which are loaded with every query tile.
    static constexpr bool kWeightsOverKeys = kRowBytes >= 1024;
    // Whether it can make dQ, too.
    static constexpr bool kAddsQueries = kKind != Kind::precise && !kWeightsOverKeys;
    static constexpr int kRowsBytes = kTileQ * (2 * kStride + kNumberBytes);
    static constexpr int kTileBytes = kKeysBytes + (kWeightsOverKeys ? 0 : 2 * kWeightBytes);
    // Where keys are rows there are always two stages.
    static constexpr int shared_bytes(int tiles, int stages) {
      return tiles * kTileBytes + (kKeyRows ? 2 : stages) * kRowsBytes;
    }
    static_assert(!kWeightsOverKeys || kWeightBytes <= kTileK * kStride);
    static_assert(shared_bytes(kMaxTiles > 1 ? 2 : 1, 1) <= kSmallestShared);
  };

  // A query tile's dQ, as the key-stationary kernel adds it up: eight chunks, half the rows by a quarter of the
  // columns, each the work of one warp and in memory as its lanes hold it, 32 lanes' element after 32 lanes' element.
  struct Share {
    static constexpr int kRows = Keys::kTileQ / 2;
    static constexpr int kRowBlocks = kRows / 16;
    static constexpr int kColumns = kHeadDim / 4;
    static constexpr int kElements = kRows * kColumns / 32;  // of a lane
  };
};

}  // namespace dspattn::cuda::general::backward
