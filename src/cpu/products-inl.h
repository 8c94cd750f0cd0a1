// The two products of a tile.
//
//   tile_product   every key of a block against every row of a tile: scores = K Q^T (and dP = V dO^T in backward)
//   add_kept       each row's kept keys only: O += weights V (and dQ += dS K)
//   gather_kept    the transpose of add_kept: dV += weights^T dO, dK += dS^T Q
#if defined(DSPATTN_CPU_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSPATTN_CPU_PRODUCTS_INL_H_
#undef DSPATTN_CPU_PRODUCTS_INL_H_
#else
#define DSPATTN_CPU_PRODUCTS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu/load-inl.h"
#include "cpu/tile.h"

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {

// Register block of tile_product: kKeysAtOnce x kVecsAtOnce accumulators. A broadcast serves kVecsAtOnce products and a
// row vector kKeysAtOnce, so fused multiply-adds, not loads, are the limit; accumulators plus one broadcast and the row
// vectors must fit the registers (AVX2 has 16, the others 32).
//
// NEON multiplies by one lane of a vector: four numbers of a key come with one load and need no broadcast.
// Its cores look less far ahead (128 instructions on a Neoverse-N1, of which a slot of 64 columns takes 30), so that
// add_kept has to find a slot's keys before it multiplies the one before (kKeysEarly). Measured on an N1, one core, of
// a peak of 40 GFLOP/s: tile_product 38.3 with 2 x 8 by lane, 36.9 with 8 x 2 by lane, 32.1 with 4 x 4 and broadcasts;
// add_kept 27.9 with keys found early, 21.4 without.
#if HWY_TARGET == HWY_AVX3
inline constexpr int kKeysAtOnce = 8, kVecsAtOnce = 2;
inline constexpr int kKeptAccumulators = 16;
inline constexpr bool kKeysEarly = false;
#elif HWY_TARGET == HWY_AVX2
inline constexpr int kKeysAtOnce = 4, kVecsAtOnce = 2;
inline constexpr int kKeptAccumulators = 8;
inline constexpr bool kKeysEarly = false;
#elif DSPATTN_TARGET_IS_NEON
inline constexpr int kKeysAtOnce = 2, kVecsAtOnce = 8;
inline constexpr int kKeptAccumulators = 16;
inline constexpr bool kKeysEarly = true;
#else
inline constexpr int kKeysAtOnce = 4, kVecsAtOnce = 4;
inline constexpr int kKeptAccumulators = 16;
inline constexpr bool kKeysEarly = false;
#endif
static_assert(kTileK % kKeysTogether == 0 && kKeysTogether % kKeysAtOnce == 0 && kVecsQ % kVecsAtOnce == 0);

// Rows of keys (of K or V) in fp32 as tile_product reads them: `columns` numbers of a key in runs of `width`.
struct KeyRows {
  const float* data = nullptr;
  std::ptrdiff_t key_stride = 0;
  int columns = 0;
  int width = 0;
  std::ptrdiff_t panel_stride = 0;  // from one run of a key to the next

  static KeyRows of(const float* panels, const PanelShape& shape) {
    return {panels, shape.width, shape.columns, shape.width, static_cast<std::ptrdiff_t>(shape.panel_elems())};
  }
};

// The accumulators of tile_product and one step of it: each key's number times the row vectors at `rows`.
struct ProductBlock {
  VecF sum[kKeysAtOnce][kVecsAtOnce];

  ProductBlock() {
    for (auto& of_key : sum) {
      for (auto& s : of_key) s = hn::Zero(kF32);
    }
  }
  template <class KeyNumber>
  HWY_INLINE void add(const float* HWY_RESTRICT rows, const KeyNumber& number) {
    VecF row[kVecsAtOnce];
    HWY_UNROLL(16)
    for (int i = 0; i < kVecsAtOnce; ++i) row[i] = hn::Load(kF32, rows + i * kLanes);
    HWY_UNROLL(16)
    for (int j = 0; j < kKeysAtOnce; ++j) {
      const VecF key_x = number(j);
      HWY_UNROLL(16)
      for (int i = 0; i < kVecsAtOnce; ++i) sum[j][i] = hn::MulAdd(key_x, row[i], sum[j][i]);
    }
  }
};

// out[key][row] = sum over x of key[x] * packed[x][row], for keys in [begin, end), which are multiples of kKeysAtOnce.
// Sums run over x in ascending order in every case, so forward and backward see the same bits.
inline void tile_product(const KeyRows& block, const float* HWY_RESTRICT packed, int begin, int end, ScoreTile& out) {
  const std::ptrdiff_t stride = block.key_stride;
  for (int key = begin; key < end; key += kKeysAtOnce) {
    for (int v = 0; v < kVecsQ; v += kVecsAtOnce) {
      ProductBlock sums;
      const float* HWY_RESTRICT rows = packed + v * kLanes;
      const float* HWY_RESTRICT keys = block.data + key * stride;
      for (int left = block.columns; left > 0; left -= block.width, keys += block.panel_stride) {
        const int depth = left < block.width ? left : block.width;
        int x = 0;
#if DSPATTN_TARGET_IS_NEON
        for (; x + 4 <= depth; x += 4, rows += 4 * kTileQ) {
          VecF four[kKeysAtOnce];
          for (int j = 0; j < kKeysAtOnce; ++j) four[j] = hn::LoadU(kF32, keys + j * stride + x);
          sums.add(rows, [&](int j) HWY_ATTR { return hn::Broadcast<0>(four[j]); });
          sums.add(rows + kTileQ, [&](int j) HWY_ATTR { return hn::Broadcast<1>(four[j]); });
          sums.add(rows + 2 * kTileQ, [&](int j) HWY_ATTR { return hn::Broadcast<2>(four[j]); });
          sums.add(rows + 3 * kTileQ, [&](int j) HWY_ATTR { return hn::Broadcast<3>(four[j]); });
        }
#endif
        for (; x < depth; ++x, rows += kTileQ) {
          sums.add(rows, [&](int j) HWY_ATTR { return hn::Set(kF32, keys[j * stride + x]); });
        }
      }
      for (int j = 0; j < kKeysAtOnce; ++j) {
        for (int i = 0; i < kVecsAtOnce; ++i) hn::Store(sums.sum[j][i], kF32, &out.value[key + j][(v + i) * kLanes]);
      }
    }
  }
}

// Where the keys of a slot lie, for kRows rows. Loads are the limit: one brings the offsets of four rows.
template <int kRows>
struct SlotKeys {
  const float* key[kRows];

  SlotKeys(const std::uint16_t* HWY_RESTRICT offsets, const float* panel) {
    if constexpr (kRows % 4 == 0) {
      std::uint64_t four[kRows / 4];
      std::memcpy(four, offsets, sizeof(four));
      for (int i = 0; i < kRows; ++i) key[i] = panel + ((four[i / 4] >> (i % 4 * 16)) & 0xffff);
    } else {
      for (int i = 0; i < kRows; ++i) key[i] = panel + offsets[i];
    }
  }
};

// sum[row] += weights[row] * the row's key. Up to four vectors of a key are loaded together, in pairs where there are
// such loads.
template <int kRows, int kVecs>
HWY_INLINE void add_slot(const SlotKeys<kRows>& keys, const float* HWY_RESTRICT weights, VecF (&sum)[kRows][kVecs]) {
  HWY_UNROLL(16)
  for (int i = 0; i < kRows; ++i) {
    const VecF weight = hn::Set(kF32, weights[i]);
    // 48 columns are six vectors of eight.
    constexpr int kTogether = kVecs % 4 == 0 ? 4 : kVecs % 3 == 0 ? 3 : kVecs;
    static_assert(kVecs % kTogether == 0 && kTogether <= 4);
    HWY_UNROLL(16)
    for (int c = 0; c < kVecs; c += kTogether) {
      VecF key[kTogether];
      HWY_UNROLL(4)
      for (int j = 0; j < kTogether; ++j) key[j] = hn::Load(kF32, keys.key[i] + (c + j) * kLanes);
      HWY_UNROLL(4)
      for (int j = 0; j < kTogether; ++j) sum[i][c + j] = hn::MulAdd(weight, key[j], sum[i][c + j]);
    }
  }
}

// One panel of kUnits x 16 columns; kRows rows at a time hide the latency of the multiply-adds.
template <int kUnits>
inline void add_kept_panel(const Slots& slots, const SlotValues& values, const float* HWY_RESTRICT panel,
                           std::ptrdiff_t width, const float* rescale, int rows, float* HWY_RESTRICT acc,
                           std::ptrdiff_t acc_stride) {
  constexpr int kVecs = kUnits * kPad / kLanes;
  constexpr int kFit = kKeptAccumulators / kVecs;
  constexpr int kRows = kFit >= 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  static_assert(kTileQ % kRows == 0);
  const int count = slots.count;
  for (int r = 0; r < rows; r += kRows) {
    VecF sum[kRows][kVecs];
    for (int i = 0; i < kRows; ++i) {
      const VecF factor = hn::Set(kF32, rescale[r + i]);
      for (int c = 0; c < kVecs; ++c) {
        sum[i][c] = hn::Mul(hn::Load(kF32, acc + (r + i) * acc_stride + c * kLanes), factor);
      }
    }
    if (slots.all_keys) {
      for (int s = 0; s < count; ++s) {
        VecF key[kVecs];
        HWY_UNROLL(16)
        for (int c = 0; c < kVecs; ++c) key[c] = hn::Load(kF32, panel + s * width + c * kLanes);
        HWY_UNROLL(16)
        for (int i = 0; i < kRows; ++i) {
          const VecF weight = hn::Set(kF32, values.at[s][r + i]);
          HWY_UNROLL(16)
          for (int c = 0; c < kVecs; ++c) sum[i][c] = hn::MulAdd(weight, key[c], sum[i][c]);
        }
      }
    } else {
      const std::uint16_t* HWY_RESTRICT offsets = &slots.offset[0][r];
      const float* HWY_RESTRICT weights = &values.at[0][r];
      if constexpr (kKeysEarly) {
        SlotKeys<kRows> keys(offsets, panel);
        for (int s = 1; s < count; ++s, weights += kTileQ) {
          offsets += kTileQ;
          const SlotKeys<kRows> next(offsets, panel);
          add_slot(keys, weights, sum);
          keys = next;
        }
        if (count > 0) add_slot(keys, weights, sum);
      } else {
        for (int s = 0; s < count; ++s, offsets += kTileQ, weights += kTileQ) {
          add_slot(SlotKeys<kRows>(offsets, panel), weights, sum);
        }
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int c = 0; c < kVecs; ++c) hn::Store(sum[i][c], kF32, acc + (r + i) * acc_stride + c * kLanes);
    }
  }
}

// acc[row] = acc[row] * rescale[row] + sum over the row's slots of values * key row, in the columns of one panel. acc
// is [kTileQ][shape.padded].
inline void add_kept(const Slots& slots, const SlotValues& values, const float* HWY_RESTRICT panels,
                     const PanelShape& shape, int panel, const float* rescale, int rows, float* HWY_RESTRICT acc) {
  using Panel = decltype(&add_kept_panel<1>);
  static constexpr Panel kByUnits[kPanel / kPad] = {add_kept_panel<1>, add_kept_panel<2>, add_kept_panel<3>,
                                                    add_kept_panel<4>};
  kByUnits[shape.columns_of(panel) / kPad - 1](slots, values,
                                               panels + static_cast<std::size_t>(panel) * shape.panel_elems(),
                                               shape.width, rescale, rows, acc + panel * shape.width, shape.padded);
}

// One of the sums that gather_kept makes in a panel: panel[key] += values[key][row] * rows[row].
struct KeySum {
  const ScoreTile* values = nullptr;
  const float* rows = nullptr;  // [kTileQ][row_stride]
  std::ptrdiff_t row_stride = 0;
  float* panel = nullptr;
};

// kSums sums in panels of kUnits x 16 columns. A key's sums stay in registers while its rows are taken from the bits;
// two sums at once (dV and dK) share the walk over the bits and hide each other's latency.
template <int kUnits, int kSums>
inline void gather_kept_panel(const KeptRows& kept, int begin, int end, std::ptrdiff_t width, const KeySum* sums) {
  constexpr int kVecs = kUnits * kPad / kLanes;
  for (int key = begin; key < end; ++key) {
    std::uint32_t bits = kept.rows[key];
    if (bits == 0) continue;
    VecF sum[kSums][kVecs];
    for (int i = 0; i < kSums; ++i) {
      for (int c = 0; c < kVecs; ++c) sum[i][c] = hn::Load(kF32, sums[i].panel + key * width + c * kLanes);
    }
    for (; bits != 0; bits &= bits - 1) {
      const std::ptrdiff_t row = std::countr_zero(bits);
      HWY_UNROLL(2)
      for (int i = 0; i < kSums; ++i) {
        const VecF value = hn::Set(kF32, sums[i].values->value[key][row]);
        const float* HWY_RESTRICT from = sums[i].rows + row * sums[i].row_stride;
        HWY_UNROLL(16)
        for (int c = 0; c < kVecs; ++c) sum[i][c] = hn::MulAdd(value, hn::Load(kF32, from + c * kLanes), sum[i][c]);
      }
    }
    for (int i = 0; i < kSums; ++i) {
      for (int c = 0; c < kVecs; ++c) hn::Store(sum[i][c], kF32, sums[i].panel + key * width + c * kLanes);
    }
  }
}

template <int kSums>
inline void gather_kept(const KeptRows& kept, int begin, int end, int columns, std::ptrdiff_t width,
                        const KeySum* sums) {
  using Panel = decltype(&gather_kept_panel<1, kSums>);
  static constexpr Panel kByUnits[kPanel / kPad] = {gather_kept_panel<1, kSums>, gather_kept_panel<2, kSums>,
                                                    gather_kept_panel<3, kSums>, gather_kept_panel<4, kSums>};
  kByUnits[columns / kPad - 1](kept, begin, end, width, sums);
}

}  // namespace dspattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
