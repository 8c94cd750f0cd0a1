// The variants of the fused forward kernels.
#pragma once

#include <cstdint>

#include "cuda/tile/head_dims.h"

namespace dspattn::cuda::sm90 {

// Each head dim is compiled in up to three variants, because registers are what the kernel is short of:
//   wide     three consumer warpgroups, 192 query rows a CTA: best for long sequences at small head dims
//   narrow   two, 128 rows: short sequences, larger head dims
//   full     two, in pairs of CTAs, where every row sees all keys and these are whole blocks: half of the
//            narrow one's code, and less to do between two items (full.h)
//   general  two, and everything the others leave out: mask tensors, tensors that are not 16-byte aligned
enum class Variant : std::uint8_t { wide, narrow, full, general };

constexpr const char* name_of(Variant variant) {
  switch (variant) {
    case Variant::wide:
      return "wide";
    case Variant::narrow:
      return "narrow";
    case Variant::full:
      return "full";
    case Variant::general:
      return "general";
  }
  return "";
}

// How a kernel is compiled: a variant, with or without the weight of pruned keys going to a mean of V (rest = mean).
struct Build {
  Variant variant = Variant::general;
  bool rest_mean = false;

  constexpr Build(Variant v, bool mean = false) : variant(v), rest_mean(mean) {}  // NOLINT(*-explicit-*)
};

// The general variant is compiled for every other head dim only; smaller ones are filled up with zeros.
constexpr int general_dim(int dim) { return tile::head_dim_from(tile::kGeneralHeadDims, dim); }

// So are all kernels with rest = mean, and of these the general variant still more rarely.
constexpr int mean_dim(int dim) { return general_dim(dim); }
constexpr int mean_general_dim(int dim) { return tile::head_dim_from(tile::kMeanGeneralHeadDims, dim); }

// fp16 inputs are multiplied by the largest power of two not above the scale: that must be a normal number, and above 1
// it could overflow them.
inline constexpr double kLeastFp16Scale = 0x1p-14;
inline constexpr double kFp16ScaleEnd = 2;

}  // namespace dspattn::cuda::sm90
