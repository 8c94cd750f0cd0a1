// Every row of the fused backward on a GPU: random problems of the whole contract against the oracle, reruns bit for
// bit, near-ties, masks, empty rows, packed batches. Skipped without a Hopper GPU. random_problems.h: how many
// problems.
//
// A problem's forward is the library's own: its selection must be repeated bit for bit, or gradients are far off where
// scores nearly tie.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "check/check.h"
#include "cuda/fused_rows.h"
#include "cuda/sm90/backward/rows.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace {

class BackwardRow : public Robust {
 protected:
  // The three-part comparison of a problem, in all forms.
  void expect_gradients(check::Case drawn) const {
    drawn.pass = Pass::backward;
    drawn.want_lse = true;
    const check::Runner runner = check::library_runner(gpu_memory(), {}, GetParam());
    check::CheckOptions options;
    options.device = kGpu;
    for (const Form& form : forms()) {
      set_form(drawn, form);
      const check::CaseReport report = check::check_drawn(drawn, runner, options);
      for (const std::string& failure : report.failures) ADD_FAILURE() << report.description << "\n" << failure;
    }
  }
};

TEST_P(BackwardRow, AgreesWithTheOracleOnRandomProblems) {
  const Row of = row();
  const std::int64_t wanted = problems_wanted();
  const std::uint64_t seed = problems_seed();
  std::int64_t served = 0, failed = 0;
  double worst = 0;
  for (std::int64_t index = 0; served < wanted && index < 100 * wanted; ++index) {
    check::CheckOptions options;
    options.device = kGpu;
    options.limits.pass = Pass::backward;
    options.limits.dtype = of.dtype;
    options.limits.pattern = of.pattern;
    // Half of the problems at the row's own head dim, the others at whatever is drawn and the row serves.
    if (index % 2 == 0) options.limits.head_dim = of.dim;
    // The oracle takes nearly all of the time: many short problems, and a few with many key tiles.
    options.limits.max_work = 3'000'000;
    if (index % 16 == 15 && wanted >= 20) {
      options.limits.max_n = 1025;
      options.limits.max_work = 15'000'000;
    }
    const check::CaseReport report = check::check_case(seed, index, of.name, options);
    if (!report.served) continue;
    ++served;
    worst = std::max(worst, report.worst);
    if (report.passed()) continue;
    ++failed;
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << report.description << "\n" << failure << "\n" << report.command;
    }
  }
  std::cout << of.name << ": " << served << " problems, " << failed << " failed; largest error " << worst
            << " of what is allowed\n";
  EXPECT_EQ(served, wanted);
}

// Small integers: sums are exact, and most groups have ties.
TEST_P(BackwardRow, RepeatsTheSelectionWhereScoresTie) {
  check::Case drawn = row().problem(2, 100, 261);
  drawn.integers = true;
  expect_gradients(drawn);
  drawn.causal = true;
  expect_gradients(drawn);
  check::Case equal = row().problem(2, 40, 261);
  equal.magnitude = 0;
  expect_gradients(equal);
}

TEST_P(BackwardRow, RowsWithoutKeysAndKeysWithoutRows) {
  expect_gradients(row().problem(2, 130, 1));
  check::Case hidden = row().problem(2, 130, 200);
  hidden.key_lengths = {0};
  expect_gradients(hidden);
  check::Case empty = row().problem(2, 300, 150);  // the first 150 rows see nothing
  empty.causal = true;
  expect_gradients(empty);
}

TEST_P(BackwardRow, MasksAndSharedKeys) {
  check::Case drawn = row().problem(2, 150, 261);
  drawn.kv_heads = 1;
  drawn.d_v = row().dim - 8;
  drawn.bias = check::Broadcast{};
  drawn.allowed = check::Broadcast{};
  drawn.causal = true;
  drawn.window_left = 170;
  expect_gradients(drawn);
}

// A mask is bits for so many keys at a time, a launch for each range of them: shares of dQ are counted on from launch
// to launch. Sequences that share the mask follow each other.
TEST_P(BackwardRow, BooleanMasksOfManyKeys) {
  check::Case drawn = row().problem(1, 150, 4300);
  drawn.batch = 2;
  drawn.pass = Pass::backward;
  drawn.want_lse = true;
  drawn.grouping = Grouping::interleaved;
  drawn.allowed = check::Broadcast{.one = {true, false, false, false}};
  check::CheckOptions options;
  options.device = kGpu;
  for (const bool causal : {false, true}) {
    drawn.causal = causal;
    const check::CaseReport report =
        check::check_drawn(drawn, check::library_runner(gpu_memory(), {}, GetParam()), options);
    for (const std::string& failure : report.failures) ADD_FAILURE() << report.description << "\n" << failure;
  }
}

TEST_P(BackwardRow, PackedBatches) {
  check::Case packed = row().problem(1, 160, 140);
  packed.packed = true;
  packed.batch = 4;
  packed.cu_q = {0, 160, 161, 231, 300};
  packed.cu_k = {0, 140, 268, 268, 330};
  packed.tail_q = packed.tail_k = 3;
  expect_gradients(packed);
  packed.causal = true;
  expect_gradients(packed);
}

// Again and again: many shares of every dQ, and several items for every CTA. The oracle takes most of the time, so the
// first problem has few heads and the second short sequences.
TEST_P(BackwardRow, GivesTheSameBitsOverReruns) {
  const check::Runner runner = check::library_runner(gpu_memory(), {}, GetParam());
  check::CheckOptions options;
  options.device = kGpu;
  options.reruns = static_cast<int>(from_environment("DSPATTN_FUSED_RERUNS", 100));
  const auto expect_same = [&](check::Case drawn) {
    drawn.pass = Pass::backward;
    drawn.want_lse = true;
    const check::CaseReport report = check::check_drawn(drawn, runner, options);
    for (const std::string& failure : report.failures) ADD_FAILURE() << report.description << "\n" << failure;
  };
  check::Case shares = row().problem(1, 260, 1100);
  expect_same(shares);
  shares = row().problem(2, 500, 500);
  shares.causal = true;
  expect_same(shares);
  check::Case items = row().problem(17, 70, 130);
  items.batch = 9;
  expect_same(items);
}

INSTANTIATE_TEST_SUITE_P(Table, BackwardRow, ::testing::ValuesIn(names_of(cuda::sm90::fused_backward_rows())),
                         name_of<std::string>);

}  // namespace
}  // namespace dspattn
