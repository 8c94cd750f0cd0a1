// Scores of a tile, masked and pruned: the part that forward and backward share, so that both choose the same keys to
// the last bit.
#if defined(DSPATTN_CPU_PRUNE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSPATTN_CPU_PRUNE_INL_H_
#undef DSPATTN_CPU_PRUNE_INL_H_
#else
#define DSPATTN_CPU_PRUNE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/job.h"
#include "cpu/load-inl.h"
#include "cpu/products-inl.h"
#include "cpu/select-inl.h"
#include "cpu/shared-inl.h"
#include "cpu/softmax-inl.h"
#include "cpu/tile.h"

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {

// The keys of a block for tile_product: read where they are when they are fp32 and none past the end will be touched,
// from `panels` (filled here) otherwise.
inline KeyRows keys_of_block(const Job& job, const SequenceSpan& sequence, std::int64_t kv_head, std::int64_t block,
                             const PanelShape& shape, float* row, float* panels) {
  const unsigned char* source = job.k.at(sequence.batch, kv_head, sequence.k_begin + block);
  const std::int64_t left = sequence.n_k - block;
  if (job.k.dtype == DType::f32 && left >= round_up(job.block_keys, kKeysAtOnce)) {
    const auto stride = static_cast<std::ptrdiff_t>(job.k.row_bytes / static_cast<std::int64_t>(sizeof(float)));
    return {reinterpret_cast<const float*>(source), stride, shape.columns, shape.columns, 0};
  }
  const int keys = static_cast<int>(std::min<std::int64_t>(job.block_keys, left));
  fill_panels(source, job.k.dtype, job.k.row_bytes, keys, shape, row, panels);
  return KeyRows::of(panels, shape);
}

// Rows of a tensor that a tile stands for, widened: [kTileQ][padded], rows past the last are zero.
inline void widen_tile(const Rows& tensor, const SequenceSpan& sequence, const TileRows& tile, const PanelShape& shape,
                       float* HWY_RESTRICT rows) {
  for (int r = 0; r < tile.rows; ++r) {
    widen_row(tensor.at(sequence.batch, tile.head[r], sequence.q_begin + tile.position[r]), tensor.dtype, shape.columns,
              rows + static_cast<std::ptrdiff_t>(r) * shape.padded);
  }
  const std::size_t used = static_cast<std::size_t>(tile.rows) * static_cast<std::size_t>(shape.padded);
  const std::size_t all = static_cast<std::size_t>(kTileQ) * static_cast<std::size_t>(shape.padded);
  std::memset(rows + used, 0, (all - used) * sizeof(float));
}

// The same transposed: [columns][kTileQ]. `rows` is a buffer of [kTileQ][padded].
inline void pack_tile(const Rows& tensor, const SequenceSpan& sequence, const TileRows& tile, const PanelShape& shape,
                      float* HWY_RESTRICT rows, float* HWY_RESTRICT packed) {
  const float* row[kTileQ];
  const bool in_place = tensor.dtype == DType::f32 && shape.columns % 4 == 0 && tile.rows == kTileQ;
  if (!in_place) widen_tile(tensor, sequence, tile, shape, rows);
  for (int r = 0; r < kTileQ; ++r) {
    row[r] = in_place ? reinterpret_cast<const float*>(
                            tensor.at(sequence.batch, tile.head[r], sequence.q_begin + tile.position[r]))
                      : rows + static_cast<std::ptrdiff_t>(r) * shape.padded;
  }
  transpose_tile(row, shape.columns, packed);
}

inline float widen_one(const unsigned char* source, DType dtype) {
  HWY_ALIGN float row[kPad];
  if (dtype == DType::f32) {
    std::memcpy(row, source, sizeof(float));
  } else {
    widen_row(source, dtype, 1, row);
  }
  return row[0];
}

// What `allowed` and `bias` add to each score of a tile, in the units of scores; -inf masks. A finite bias stays
// finite.
inline void fill_bias(const Job& job, const SequenceSpan& sequence, const TileRows& tile, std::int64_t block, int begin,
                      int end, ScoreTile& out) {
  const float per_scale = static_cast<float>(job.unit / job.g.scale);  // at most 1
  const auto entry = [&](int r, int key) HWY_ATTR {
    const std::int64_t index[4] = {sequence.index, tile.head[r], tile.position[r], block + key};
    const auto address = [&](const MaskTensor& tensor) {
      return tensor.data + index[0] * tensor.stride[0] + index[1] * tensor.stride[1] + index[2] * tensor.stride[2] +
             index[3] * tensor.stride[3];
    };
    if (job.allowed.present() && *address(job.allowed) == 0) return -std::numeric_limits<float>::infinity();
    if (!job.bias.present()) return 0.0f;
    return widen_one(address(job.bias), job.bias.dtype) * per_scale;
  };
  // Keys past the sequence's end are masked by the limits already; the mask tensors do not reach there.
  const int inside = static_cast<int>(std::min<std::int64_t>(end, sequence.n_k - block));
  const bool uniform = job.allowed.same_for_rows(job.group_heads) && job.bias.same_for_rows(job.group_heads);
  for (int key = begin; key < end; ++key) {
    if (key >= inside || uniform) {
      const float value = key < inside ? entry(0, key) : 0.0f;
      for (int r = 0; r < kTileQ; ++r) out.value[key][r] = value;
    }
  }
  for (int r = 0; r < kTileQ && !uniform; ++r) {
    for (int key = begin; key < inside; ++key) out.value[key][r] = entry(r, key);
  }
}

// A product of q and k in the units of scores, and its bias. Finite parts have a finite sum: beyond fp32 it is the
// largest number, so that it neither masks its key nor makes its row undefined.
inline VecF biased(VecF product, VecF unit, VecF bias) {
  const VecF sum = hn::MulAdd(product, unit, bias);
  const VecF largest = hn::Set(kF32, std::numeric_limits<float>::max());
  const auto finite = [&](VecF value) HWY_ATTR { return hn::Le(hn::Abs(value), largest); };
  const MaskF overflowed = hn::And(hn::Not(finite(sum)), hn::And(finite(product), finite(bias)));
  return hn::IfThenElse(overflowed, hn::CopySign(largest, sum), sum);
}

// Adds the bias and sets what a row may not see to -inf.
inline void mask_scores(const LaneLimits& limits, const ScoreTile* bias, float score_unit, int begin, int end,
                        ScoreTile& scores) {
  const VecF unit = hn::Set(kF32, score_unit);
  for (int v = 0; v < kVecsQ; ++v) {
    const int row = v * kLanes;
    const VecI from = hn::Load(kI32, limits.begin + row), to = hn::Load(kI32, limits.end + row);
    for (int key = begin; key < end; ++key) {
      const VecI index = hn::Set(kI32, key);
      VecF score = hn::Load(kF32, &scores.value[key][row]);
      if (bias != nullptr) {
        const VecF extra = hn::Load(kF32, &bias->value[key][row]);
        score = hn::IfThenElse(hn::Eq(extra, minus_infinity()), extra, biased(score, unit, extra));
      }
      const auto hidden = hn::Or(hn::Lt(index, from), hn::Not(hn::Lt(index, to)));
      score = hn::IfThenElse(hn::RebindMask(kF32, hidden), minus_infinity(), score);
      hn::Store(score, kF32, &scores.value[key][row]);
    }
  }
}

// cap * tanh(product * scale / cap), and the slope of that function where it has this value.
struct SoftCap {
  VecF scale, cap, per_cap;
  Exp2 exp2;

  explicit SoftCap(const Job& job)
      : scale(hn::Set(kF32, static_cast<float>(job.g.scale))),
        cap(hn::Set(kF32, job.soft_cap)),
        per_cap(hn::Set(kF32, 1.0f / job.soft_cap)),
        exp2(2.88539008f) {}  // 2 log2(e)

  VecF operator()(VecF product) const {
    const VecF x = hn::Mul(hn::Mul(product, scale), per_cap);
    const VecF one = hn::Set(kF32, 1.0f);
    // Near 0 an odd polynomial, near-minimax on |x| <= 0.6 with a relative error of 2.5e-9; beyond, by exponentials.
    const VecF z = hn::Mul(x, x);
    VecF p = hn::Set(kF32, -0.005852171685546637f);
    p = hn::MulAdd(p, z, hn::Set(kF32, 0.020753640681505203f));
    p = hn::MulAdd(p, z, hn::Set(kF32, -0.053768713027238846f));
    p = hn::MulAdd(p, z, hn::Set(kF32, 0.13331688940525055f));
    p = hn::MulAdd(p, z, hn::Set(kF32, -0.3333328366279602f));
    p = hn::Mul(hn::MulAdd(p, z, one), x);
    const VecF e = exp2(hn::Neg(hn::Abs(x)));
    const VecF far = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
    return hn::Mul(cap, hn::IfThenElse(hn::Le(hn::Abs(x), hn::Set(kF32, 0.6f)), p, far));
  }
  VecF slope(VecF capped) const {
    const VecF t = hn::Mul(capped, per_cap);
    return hn::NegMulAdd(t, t, hn::Set(kF32, 1.0f));
  }
};

inline void cap_products(const Job& job, int begin, int end, const ScoreTile& products, ScoreTile& capped) {
  const SoftCap soft_cap(job);
  for (int key = begin; key < end; ++key) {
    for (int v = 0; v < kVecsQ; ++v) {
      hn::Store(soft_cap(hn::Load(kF32, &products.value[key][v * kLanes])), kF32, &capped.value[key][v * kLanes]);
    }
  }
}

// A value of each slot's key. A slot without a key finds that of the tile's last row.
inline void values_by_slot(int width, const ScoreTile& values, const Slots& slots, SlotValues& by_slot) {
  const hn::Rebind<std::uint16_t, I32> narrow;
  int log2_width = 0;
  while ((1 << log2_width) < width) ++log2_width;
  for (int s = 0; s < slots.count; ++s) {
    for (int v = 0; v < kVecsQ; ++v) {
      const int row = v * kLanes;
      const VecI key = hn::ShiftRightSame(hn::PromoteTo(kI32, hn::Load(narrow, &slots.offset[s][row])), log2_width);
      const VecI index = hn::Add(hn::Mul(key, hn::Set(kI32, kTileQ)), hn::Iota(kI32, row));
      hn::Store(hn::GatherIndex(kF32, &values.value[0][0], index), kF32, &by_slot.at[s][row]);
    }
  }
}

// The part [first, last) of the block's keys that some row of a tile sees, begun at a multiple of kKeysAtOnce; empty
// (last = 0) when none does.
struct KeySpan {
  int first = 0;
  int last = 0;
  int computed() const { return static_cast<int>(round_up(last, kKeysAtOnce)); }
};

inline KeySpan visible_keys(const Job& job, const TileRows& tile, std::int64_t block) {
  if (tile.most_end <= block || tile.least_begin >= block + job.block_keys) return {};
  KeySpan span;
  span.first = static_cast<int>(std::max<std::int64_t>(0, tile.least_begin - block)) / kKeysAtOnce * kKeysAtOnce;
  span.last = static_cast<int>(std::min<std::int64_t>(tile.most_end - block, job.block_keys));
  return span;
}

// The groups that have a key in `span`: all others are masked. A dense pattern has keys instead of groups.
inline void set_groups(const KeySpan& span, bool dense, SelectArgs& args) {
  const bool one_key_each = dense || (args.group_step == 1 && span.last <= args.element_step);
  if (one_key_each) {
    args.begin = span.first;
    args.end = span.last;
  } else if (args.group_step == 1) {
    args.begin = 0;
    args.end = args.element_step;
  } else {
    args.begin = span.first / args.group;
    args.end = (span.last + args.group - 1) / args.group;
  }
}

// Masks the keys of these groups that lie outside of `span`: no score was computed for them.
inline void mask_rest(const KeySpan& span, bool dense, const SelectArgs& args, ScoreTile& scores) {
  if (dense || (span.first == 0 && span.last == args.group * (args.group_step > 1 ? args.end : args.element_step)))
    return;
  for (int g = args.begin; g < args.end; ++g) {
    for (int e = 0; e < args.group; ++e) {
      const int key = g * args.group_step + e * args.element_step;
      if (key >= span.first && key < span.last) continue;
      for (int v = 0; v < kVecsQ; ++v) hn::Store(minus_infinity(), kF32, &scores.value[key][v * kLanes]);
    }
  }
}

// After the choice, which is by the scores as they were: scores that are weighed, in the tile and in the slots.
inline void take_capped(const Job& job, const KeySpan& span, bool with_bias, int width, PruneScratch& scratch,
                        Slots& slots) {
  const VecF per_unit = hn::Set(kF32, static_cast<float>(job.g.scale / job.unit));
  for (int key = span.first; key < span.last; ++key) {
    for (int v = 0; v < kVecsQ; ++v) {
      const int row = v * kLanes;
      float* score = &scratch.scores.value[key][row];
      VecF capped = hn::Load(kF32, &scratch.capped.value[key][row]);
      if (with_bias) capped = biased(hn::Load(kF32, &scratch.bias.value[key][row]), per_unit, capped);
      const MaskF masked = hn::Eq(hn::Load(kF32, score), minus_infinity());
      hn::Store(hn::IfThenElse(masked, minus_infinity(), capped), kF32, score);
    }
  }
  for (int v = 0; v < kVecsQ; ++v) hn::Store(minus_infinity(), kF32, &scratch.scores.value[kTileK][v * kLanes]);
  values_by_slot(width, scratch.scores, slots, slots.value);
  for (int v = 0; v < kVecsQ; ++v) {
    VecF largest = minus_infinity();
    for (int s = 0; s < slots.count; ++s) {
      largest = hn::Max(largest, hn::Load(kF32, &slots.value.at[s][v * kLanes]));
    }
    hn::Store(largest, kF32, slots.row_max + v * kLanes);
  }
}

// Fills `slots` with what the rows of `tile` keep of the keys [block, block + job.block_keys). False when they see none
// of them. `packed` is q transposed; `width` is that of the panels the slots will index. With
// `kept`, the selection is noted there by key, too. With `totals`, the heads of a position choose together.
inline bool prune_tile(const Job& job, const SequenceSpan& sequence, const TileRows& tile, const float* packed,
                       const KeyRows& block_keys, std::int64_t block, int width, PruneScratch& scratch, Slots& slots,
                       KeptRows* kept = nullptr, const TileTotals* totals = nullptr) {
  const std::int64_t keys = job.block_keys;
  const KeySpan span = visible_keys(job, tile, block);
  if (span.last == 0) return false;
  tile_product(block_keys, packed, span.first, span.computed(), scratch.scores);
  if (job.soft_cap > 0) cap_products(job, span.first, span.last, scratch.scores, scratch.capped);

  const bool with_bias = job.allowed.present() || job.bias.present();
  const bool cut = tile.most_begin > block || tile.least_end < block + keys;
  if (with_bias) fill_bias(job, sequence, tile, block, span.first, span.last, scratch.bias);
  if (with_bias || cut) {
    for (int r = 0; r < kTileQ; ++r) {
      scratch.limits.begin[r] = static_cast<std::int32_t>(std::clamp<std::int64_t>(tile.begin[r] - block, 0, keys));
      scratch.limits.end[r] = static_cast<std::int32_t>(std::clamp<std::int64_t>(tile.end[r] - block, 0, keys));
    }
    mask_scores(scratch.limits, with_bias ? &scratch.bias : nullptr, static_cast<float>(job.unit), span.first,
                span.last, scratch.scores);
  }

  SelectArgs args;
  args.scores = &scratch.scores;
  args.keep = job.pattern.keep;
  args.group = job.pattern.group;
  const bool interleaved = job.grouping == Grouping::interleaved;
  args.group_step = interleaved ? 1 : args.group;
  args.element_step = interleaved ? kTileK / args.group : 1;
  set_groups(span, job.pattern.is_dense(), args);
  mask_rest(span, job.pattern.is_dense(), args, scratch.scores);
  args.width = width;
  args.masked = with_bias || cut;
  args.half_factor = job.half_factor;
  args.kept = kept;
  if (kept != nullptr) *kept = KeptRows{};
  slots.masked = args.masked;
  slots.all_keys = false;
  if (totals != nullptr) {
    const float scale_log2 = static_cast<float>(job.g.scale / job.unit * 1.4426950408889634);  // of scores without cap
    sum_weights(*totals, scale_log2, static_cast<int>(job.group_heads), tile.rows, args, scratch.sums);
    args.sums = &scratch.sums;
  }
  select_function(job.pattern, job.half_keys, totals != nullptr)(args, slots);
  if (job.soft_cap > 0) take_capped(job, span, with_bias, width, scratch, slots);
  // A row that sees nothing but NaN fills no slot, yet is not empty.
  return slots.count > 0 || std::any_of(slots.has_nan, slots.has_nan + kTileQ, [](float flag) { return flag != 0.0f; });
}

}  // namespace dspattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
