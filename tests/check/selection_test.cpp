// How differing selections are judged, and that probing finds a kernel's selection.
#include "check/selection.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/device_memory.h"

namespace dspattn::check {
namespace {

// A plain 2:4 problem with one head, 8 queries and 40 keys.
Case plain_case(DType dtype, bool integers) {
  Case drawn;
  drawn.seed = 3;
  drawn.dtype = dtype;
  drawn.pattern = {2, 4};
  drawn.n_q = 8;
  drawn.n_k = 40;
  drawn.d = 16;
  drawn.d_v = 16;
  drawn.integers = integers;
  if (integers) drawn.scale = 0.25;
  return drawn;
}

// Two keys of the first group of row 0: one that the oracle keeps with the smaller key, one it drops with the larger.
struct Rivals {
  std::int64_t kept = -1, dropped = -1;
};

Rivals rivals_of(const cpu::Reference& oracle) {
  Rivals rivals;
  for (std::int64_t j = 0; j < 4; ++j) {
    std::int64_t& best = oracle.selection.at(0, j) ? rivals.kept : rivals.dropped;
    const bool smaller = best >= 0 && oracle.keys.at(0, j) < oracle.keys.at(0, best);
    if (best < 0 || (oracle.selection.at(0, j) ? smaller : !smaller)) best = j;
  }
  return rivals;
}

TEST(Selection, ProbingFindsWhatTheOracleKept) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const CaseData data(plain_case(dtype, false), {}, core::host_memory());
    const Runner runner = library_runner(core::host_memory(), "cpu_reference", "cpu_reference");
    const cpu::Reference oracle = cpu::reference_forward(data.host_problem());
    for (const std::int64_t width : {1, 16, 48, 256}) {
      EXPECT_EQ(probe_selection(data, runner, width, 40).values, oracle.selection.values) << width;
    }
  }
}

TEST(Selection, ADifferenceWithinRoundingIsANearTieAndAnyOtherAFailure) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const CaseData data(plain_case(dtype, false), {}, core::host_memory());
    cpu::Reference oracle = cpu::reference_forward(data.host_problem());
    const Rivals rivals = rivals_of(oracle);
    cpu::Selection swapped = oracle.selection;
    swapped.at(0, rivals.kept) = 0;
    swapped.at(0, rivals.dropped) = 1;

    const SelectionJudgement wrong = judge_selection(data, oracle, swapped);
    EXPECT_FALSE(wrong.failures.empty());

    // Had the two keys been this close, rounding could have turned the choice.
    const double step = dtype == DType::f32 ? 0x1p-23 : 0x1p-10;
    oracle.keys.at(0, rivals.dropped) = oracle.keys.at(0, rivals.kept) * (1 - step);
    const SelectionJudgement near = judge_selection(data, oracle, swapped);
    EXPECT_TRUE(near.failures.empty());
    EXPECT_EQ(near.near_ties, 1);
    EXPECT_EQ(near.selection.values, swapped.values);
  }
}

TEST(Selection, OnIntegersEveryDifferenceIsAFailure) {
  const CaseData data(plain_case(DType::bf16, true), {}, core::host_memory());
  cpu::Reference oracle = cpu::reference_forward(data.host_problem());
  const Rivals rivals = rivals_of(oracle);
  cpu::Selection swapped = oracle.selection;
  swapped.at(0, rivals.kept) = 0;
  swapped.at(0, rivals.dropped) = 1;
  oracle.keys.at(0, rivals.dropped) = oracle.keys.at(0, rivals.kept);  // an exact tie, decided the wrong way
  EXPECT_FALSE(judge_selection(data, oracle, swapped).failures.empty());
}

TEST(Selection, TooManyOrTooFewKeptKeysAreFailures) {
  const CaseData data(plain_case(DType::f32, false), {}, core::host_memory());
  const cpu::Reference oracle = cpu::reference_forward(data.host_problem());
  for (const bool more : {true, false}) {
    cpu::Selection other = oracle.selection;
    const Rivals rivals = rivals_of(oracle);
    other.at(0, more ? rivals.dropped : rivals.kept) = more;
    EXPECT_FALSE(judge_selection(data, oracle, other).failures.empty());
  }
}

TEST(Selection, AWeightTooSmallToSeeIsTakenFromTheOracle) {
  const CaseData data(plain_case(DType::f16, false), {}, core::host_memory());
  cpu::Reference oracle = cpu::reference_forward(data.host_problem());
  const Rivals rivals = rivals_of(oracle);
  oracle.scores.at(0, rivals.kept) -= 40;  // a weight of e^-40 vanishes in fp16
  cpu::Selection probed = oracle.selection;
  probed.at(0, rivals.kept) = 0;
  const SelectionJudgement judgement = judge_selection(data, oracle, probed);
  EXPECT_TRUE(judgement.failures.empty());
  EXPECT_EQ(judgement.selection.values, oracle.selection.values);
}

}  // namespace
}  // namespace dspattn::check
