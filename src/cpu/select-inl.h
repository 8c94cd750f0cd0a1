// The choice of the `keep` largest scores of each group, on a tile whose lanes are query rows: element e of a group is
// one vector, so a choice is compares and blends between vectors. Ties keep the lower key; every comparison below asks
// "lower key >= higher key" (or strictly greater the other way round) for that reason.
//
// What is compared is the contract's selection key: the score itself for fp32 inputs, the score times a power of two
// rounded to fp16 for 16-bit inputs. The value that is kept is the precise score.
#if defined(DSPATTN_CPU_SELECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSPATTN_CPU_SELECT_INL_H_
#undef DSPATTN_CPU_SELECT_INL_H_
#else
#define DSPATTN_CPU_SELECT_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>
#include <limits>

#include "cpu/load-inl.h"
#include "cpu/simd.h"
#include "cpu/tile.h"
#include "dspattn/pattern.h"

HWY_BEFORE_NAMESPACE();
namespace dspattn::cpu::HWY_NAMESPACE {

// Which keys of a block form a group: element e of group g is key g * group_step + e * element_step.
struct SelectArgs {
  const ScoreTile* scores = nullptr;
  int begin = 0;  // groups [begin, end) of the block are looked at (keys, when nothing is pruned); others are masked
  int end = 0;
  int keep = 0;
  int group = 0;
  int group_step = 0;
  int element_step = 0;
  int width = 0;                    // columns of a panel: key * width is the key's offset
  bool masked = false;              // some scores may be -inf
  KeptRows* kept = nullptr;         // filled when given, having been cleared
  const ScoreTile* sums = nullptr;  // what is compared when the choice is shared
  float half_factor = 1;            // the power of two of the 16-bit selection key
};

using SelectFunction = void (*)(const SelectArgs& args, Slots& slots);

inline VecF minus_infinity() { return hn::Set(kF32, -std::numeric_limits<float>::infinity()); }

// Selection keys.
struct PreciseKeys {
  explicit PreciseKeys(const SelectArgs&) {}
  VecF operator()(const SelectArgs&, int, int, VecF score) const { return score; }
};

// A choice that heads share: their summed weights.
struct SharedKeys {
  explicit SharedKeys(const SelectArgs&) {}
  VecF operator()(const SelectArgs& args, int key, int v, VecF) const {
    return hn::Load(kF32, &args.sums->value[key][v * kLanes]);
  }
};

struct HalfKeys {
  VecF factor;
  explicit HalfKeys(const SelectArgs& args) : factor(hn::Set(kF32, args.half_factor)) {}

  // Nearest even to fp16, clamped to its largest finite value; -inf (masked) stays below everything.
  VecF operator()(const SelectArgs&, int, int, VecF score) const {
    const VecF largest = hn::Set(kF32, 65504.0f);
    const VecF scaled = hn::Mul(score, factor);
    const VecF clamped = hn::Max(hn::Min(scaled, largest), hn::Neg(largest));
#if !DSPATTN_CONVERTS_F16
    // Cut 13 bits of the significand with rounding; below 2^-14 the quantum is 2^-24,
    // which is that of floats in [1/2, 1).
    const U32 du;
    const auto bits = hn::BitCast(du, clamped);
    const auto odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(du, 1u));
    const auto cut = hn::And(hn::Add(hn::Add(bits, odd), hn::Set(du, 0xfffu)), hn::Set(du, 0xffffe000u));
    const VecF shift = hn::Set(kF32, 0.75f);
    const VecF fixed = hn::Sub(hn::Add(clamped, shift), shift);
    const VecF rounded =
        hn::IfThenElse(hn::Lt(hn::Abs(clamped), hn::Set(kF32, 0x1p-14f)), fixed, hn::BitCast(kF32, cut));
#else
    const VecF rounded = hn::PromoteTo(kF32, hn::DemoteTo(hn::Rebind<hwy::float16_t, F32>(), clamped));
#endif
    return hn::IfThenElse(hn::Eq(score, minus_infinity()), score, rounded);
  }
};

struct Candidate {
  VecF key, value;
  VecI offset;
};

inline Candidate choose(MaskF first, const Candidate& a, const Candidate& b) {
  return {hn::IfThenElse(first, a.key, b.key), hn::IfThenElse(first, a.value, b.value),
          hn::IfThenElse(hn::RebindMask(kI32, first), a.offset, b.offset)};
}

// What every selection gathers on its way: the largest kept score and whether any score is NaN, per row.
struct RowFacts {
  VecF largest[kVecsQ];
  MaskF nan[kVecsQ];

  RowFacts() {
    for (int v = 0; v < kVecsQ; ++v) {
      largest[v] = minus_infinity();
      nan[v] = hn::IsNaN(largest[v]);
    }
  }
  void see(int v, VecF score) { nan[v] = hn::Or(nan[v], hn::IsNaN(score)); }
  void store(Slots& slots) const {
    for (int v = 0; v < kVecsQ; ++v) {
      hn::Store(largest[v], kF32, slots.row_max + v * kLanes);
      hn::Store(hn::IfThenElseZero(nan[v], hn::Set(kF32, 1.0f)), kF32, slots.has_nan + v * kLanes);
    }
  }
};

// Writes one vector of slot `slot`. With masks about, a score of -inf is no key: it points to the zero row. Returns
// whether any row has a key there.
inline bool write_slot(Slots& slots, int slot, int v, VecF value, VecI offset, const SelectArgs& args) {
  bool any = true;
  if (args.masked) {
    const MaskF none = hn::Eq(value, minus_infinity());
    offset = hn::IfThenElse(hn::RebindMask(kI32, none), hn::Set(kI32, kTileK * args.width), offset);
    any = !hn::AllTrue(kF32, none);
  }
  hn::Store(value, kF32, &slots.value.at[slot][v * kLanes]);
  const hn::Rebind<std::uint16_t, I32> narrow;
  hn::Store(hn::DemoteTo(narrow, offset), narrow, &slots.offset[slot][v * kLanes]);
  return any;
}

// Notes that the rows of `mask` keep `key`, those of them that see it.
inline void note_kept(const SelectArgs& args, int v, int key, MaskF mask) {
  if (args.masked) {
    const VecF score = hn::Load(kF32, &args.scores->value[key][v * kLanes]);
    mask = hn::AndNot(hn::Eq(score, minus_infinity()), mask);
  }
  std::uint8_t bytes[8] = {};
  hn::StoreMaskBits(kF32, mask, bytes);
  std::uint32_t bits = 0;
  std::memcpy(&bits, bytes, sizeof(bits));
  args.kept->rows[key] |= bits << (v * kLanes);
}

template <class Keys>
inline Candidate element(const SelectArgs& args, const Keys& keys, int v, int first, int e) {
  const int key = first + e * args.element_step;
  const VecF score = hn::Load(kF32, &args.scores->value[key][v * kLanes]);
  return {keys(args, key, v, score), score, hn::Set(kI32, e * args.element_step * args.width)};
}

// How the kept of a group are found among its elements, the largest key first.
struct OneOfTwo {
  struct Kept {
    Candidate of[1];
  };
  static constexpr int kKeep = 1, kGroup = 2;

  template <class Element>
  static Kept choose_from(const Element& element) {
    const Candidate x0 = element(0), x1 = element(1);
    return {{choose(hn::Ge(x0.key, x1.key), x0, x1)}};
  }
};

struct TwoOfFour {
  struct Kept {
    Candidate of[2];
  };
  static constexpr int kKeep = 2, kGroup = 4;

  template <class Element>
  static Kept choose_from(const Element& element) {
    const Candidate x0 = element(0), x1 = element(1), x2 = element(2), x3 = element(3);
    const MaskF m01 = hn::Ge(x0.key, x1.key), m23 = hn::Ge(x2.key, x3.key);
    const Candidate high01 = choose(m01, x0, x1), low01 = choose(m01, x1, x0);
    const Candidate high23 = choose(m23, x2, x3), low23 = choose(m23, x3, x2);
    const MaskF left = hn::Ge(high01.key, high23.key);
    // The second is the loser of the final or the runner-up of the winner's pair; keys 0, 1 still go before 2, 3.
    const Candidate other01 = choose(left, low01, high01), other23 = choose(left, high23, low23);
    return {{choose(left, high01, high23), choose(hn::Ge(other01.key, other23.key), other01, other23)}};
  }
};

// Notes what a vector of rows keeps of the group that begins with key `first`.
template <class Choice>
inline void note_group(const SelectArgs& args, int v, int first, const typename Choice::Kept& kept) {
  for (int e = 0; e < Choice::kGroup; ++e) {
    const VecI offset = hn::Set(kI32, e * args.element_step * args.width);
    auto is_kept = hn::Eq(kept.of[0].offset, offset);
    for (int i = 1; i < Choice::kKeep; ++i) is_kept = hn::Or(is_kept, hn::Eq(kept.of[i].offset, offset));
    note_kept(args, v, first + e * args.element_step, hn::RebindMask(kF32, is_kept));
  }
}

// Where nothing is masked every group fills its slots in every row: the groups of one vector of rows follow each other,
// with what is gathered in registers. A score times 0 is 0 unless it is infinite or NaN: which, is asked afterwards.
template <class Keys, class Choice>
void select_whole(const SelectArgs args, Slots& slots) {
  const Keys keys(args);
  const VecI step = hn::Set(kI32, args.group_step * args.width);
  for (int v = 0; v < kVecsQ; ++v) {
    VecF largest = minus_infinity(), zero = hn::Zero(kF32);
    VecI base = hn::Set(kI32, args.begin * args.group_step * args.width);
    int slot = 0;
    for (int g = args.begin; g < args.end; ++g, base = hn::Add(base, step)) {
      const int first = g * args.group_step;
      const auto kept = Choice::choose_from([&](int e) HWY_ATTR {
        const Candidate candidate = element(args, keys, v, first, e);
        zero = hn::MulAdd(candidate.value, hn::Zero(kF32), zero);
        return candidate;
      });
      if (args.kept != nullptr) note_group<Choice>(args, v, first, kept);
      for (int i = 0; i < Choice::kKeep; ++i, ++slot) {
        // With 16-bit keys the second may have the larger precise score.
        largest = hn::Max(largest, kept.of[i].value);
        write_slot(slots, slot, v, kept.of[i].value, hn::Add(base, kept.of[i].offset), args);
      }
    }
    slots.count = slot;
    MaskF nan = hn::IsNaN(largest);
    for (int g = args.begin; g < args.end && !hn::AllTrue(kF32, hn::Eq(zero, hn::Zero(kF32))); ++g) {
      for (int e = 0; e < Choice::kGroup; ++e) {
        nan = hn::Or(nan, hn::IsNaN(element(args, keys, v, g * args.group_step, e).value));
      }
    }
    hn::Store(largest, kF32, slots.row_max + v * kLanes);
    hn::Store(hn::IfThenElseZero(nan, hn::Set(kF32, 1.0f)), kF32, slots.has_nan + v * kLanes);
  }
}

template <class Keys, class Choice>
void select_few(const SelectArgs& args, Slots& slots) {
  if (!args.masked) return select_whole<Keys, Choice>(args, slots);
  const Keys keys(args);
  RowFacts facts;
  int slot = 0;
  for (int g = args.begin; g < args.end; ++g) {
    const int first = g * args.group_step;
    const VecI base = hn::Set(kI32, first * args.width);
    bool any[Choice::kKeep] = {};
    for (int v = 0; v < kVecsQ; ++v) {
      const auto kept = Choice::choose_from([&](int e) HWY_ATTR {
        const Candidate candidate = element(args, keys, v, first, e);
        facts.see(v, candidate.value);
        return candidate;
      });
      if (args.kept != nullptr) note_group<Choice>(args, v, first, kept);
      for (int i = 0; i < Choice::kKeep; ++i) {
        facts.largest[v] = hn::Max(facts.largest[v], kept.of[i].value);
        any[i] |= write_slot(slots, slot + i, v, kept.of[i].value, hn::Add(base, kept.of[i].offset), args);
      }
    }
    for (const bool used : any) slot += used ? 1 : 0;
  }
  slots.count = slot;
  facts.store(slots);
}

// Nothing is pruned: every visible key is a slot.
inline void select_dense(const SelectArgs& args, Slots& slots) {
  RowFacts facts;
  int slot = 0;
  for (int key = args.begin; key < args.end; ++key) {
    const VecI offset = hn::Set(kI32, key * args.width);
    bool any = false;
    for (int v = 0; v < kVecsQ; ++v) {
      const VecF score = hn::Load(kF32, &args.scores->value[key][v * kLanes]);
      facts.see(v, score);
      facts.largest[v] = hn::Max(facts.largest[v], score);
      any |= write_slot(slots, slot, v, score, offset, args);
      if (args.kept != nullptr) note_kept(args, v, key, hn::Not(hn::IsNaN(score)));
    }
    slot += any ? 1 : 0;
  }
  slots.count = slot;
  slots.all_keys = !args.masked;
  facts.store(slots);
}

// Any pattern: the largest is taken `keep` times, each time struck out.
template <class Keys>
void select_any(const SelectArgs& args, Slots& slots) {
  const Keys keys(args);
  RowFacts facts;
  SelectArgs as_masked = args;
  as_masked.masked = true;  // a row that runs out of candidates (masked or NaN) must point to the zero row
  int slot = 0;
  for (int g = args.begin; g < args.end; ++g) {
    const int first = g * args.group_step;
    const VecI base = hn::Set(kI32, first * args.width);
    bool any[kMaxGroup] = {};
    for (int v = 0; v < kVecsQ; ++v) {
      VecF value[kMaxGroup], key[kMaxGroup];
      for (int e = 0; e < args.group; ++e) {
        const Candidate x = element(args, keys, v, first, e);
        facts.see(v, x.value);
        value[e] = x.value;
        key[e] = x.key;
      }
      for (int s = 0; s < args.keep; ++s) {
        Candidate best{minus_infinity(), minus_infinity(), hn::Set(kI32, -1)};
        for (int e = 0; e < args.group; ++e) {
          best = choose(hn::Gt(key[e], best.key), {key[e], value[e], hn::Set(kI32, e)}, best);
        }
        for (int e = 0; e < args.group; ++e) {
          const MaskF taken = hn::RebindMask(kF32, hn::Eq(best.offset, hn::Set(kI32, e)));
          key[e] = hn::IfThenElse(taken, minus_infinity(), key[e]);
          if (args.kept != nullptr) note_kept(args, v, first + e * args.element_step, taken);
        }
        facts.largest[v] = hn::Max(facts.largest[v], best.value);
        const VecI offset = hn::Add(base, hn::Mul(best.offset, hn::Set(kI32, args.element_step * args.width)));
        any[s] |= write_slot(slots, slot + s, v, best.value, offset, as_masked);
      }
    }
    for (int s = 0; s < args.keep; ++s) slot += any[s] ? 1 : 0;
  }
  slots.count = slot;
  facts.store(slots);
}

inline SelectFunction select_function(Pattern pattern, bool half_keys, bool shared) {
  if (pattern.is_dense()) return select_dense;
  if (shared) return select_any<SharedKeys>;
  if (pattern == Pattern{1, 2}) return half_keys ? select_few<HalfKeys, OneOfTwo> : select_few<PreciseKeys, OneOfTwo>;
  if (pattern == Pattern{2, 4}) return half_keys ? select_few<HalfKeys, TwoOfFour> : select_few<PreciseKeys, TwoOfFour>;
  return half_keys ? select_any<HalfKeys> : select_any<PreciseKeys>;
}

}  // namespace dspattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
