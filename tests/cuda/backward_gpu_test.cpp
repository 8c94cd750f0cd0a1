// Every row of the fused backward on a GPU: random problems of the whole contract against the oracle, reruns bit for
// bit, near-ties, masks, empty rows, packed batches. Skipped without a Hopper GPU. random_problems.h: how many
// problems.
//
// A problem's forward is the library's own: its selection must be repeated bit for bit, or gradients are far off where
// scores nearly tie.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <iostream>
#include <limits>
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

// Biases whose tiles are copied: 16 bits, rows that runs of four keys are aligned in, whichever dimensions are shared.
TEST_P(BackwardRow, CopiedBiases) {
  check::Case drawn = row().problem(4, 150, 260);
  drawn.kv_heads = 2;
  drawn.bias_dtype = drawn.dtype;
  drawn.bias = check::Broadcast{};
  expect_gradients(drawn);
  drawn.causal = true;
  drawn.bias = check::Broadcast{.one = {true, false, false, false}};
  expect_gradients(drawn);
  drawn.window_left = 70;
  drawn.bias = check::Broadcast{.one = {false, true, true, false}};
  drawn.lowest_bias = true;
  expect_gradients(drawn);
  drawn.allowed = check::Broadcast{};
  drawn.d = drawn.d_v = row().dim - 16;
  expect_gradients(drawn);
  // Sequences without keys, of one row, of less than a tile.
  check::Case packed = row().problem(1, 160, 140);
  packed.packed = true;
  packed.batch = 4;
  packed.cu_q = {0, 160, 161, 231, 300};
  packed.cu_k = {0, 140, 268, 268, 330};
  packed.tail_q = packed.tail_k = 3;
  packed.bias_dtype = packed.dtype;
  packed.bias = check::Broadcast{};
  expect_gradients(packed);
  check::Case lengths = row().problem(2, 70, 388);
  lengths.batch = 2;
  lengths.key_lengths = {131, 388};
  lengths.bias_dtype = lengths.dtype;
  lengths.bias = check::Broadcast{.one = {true, true, false, false}};
  expect_gradients(lengths);
}

// They give the bits of those whose elements are read where they lie: rows of an odd number of elements, or that begin
// at an odd one.
TEST_P(BackwardRow, CopiedBiasesGiveTheBitsOfOthers) {
  for (const bool causal : {false, true}) {
    check::Case drawn = row().problem(4, 330, 451);
    drawn.kv_heads = 2;
    if (causal) {
      drawn.causal = true;
      drawn.window_left = 300;
    }
    drawn.pass = Pass::backward;
    drawn.want_lse = true;
    const check::CaseData data(drawn, kGpu, gpu_memory());
    const check::Runner runner = check::library_runner(gpu_memory(), {}, GetParam());
    check::Tensor out = data.output_like_q(drawn.d_v), lse = data.lse_output();
    // Of head 0 nothing is masked, of head 1 much, of head 2 all in some tiles; head 3 is as low as can be.
    const auto value = [](std::int64_t, std::int64_t head, std::int64_t row, std::int64_t key) {
      const double some = static_cast<double>((31 * row + 17 * key + 7 * head) % 61 - 30) / 8;
      if (head == 1 && (row + 3 * key) % 7 < 2) return -std::numeric_limits<double>::infinity();
      if (head == 2 && row / 64 == key / 128) return -std::numeric_limits<double>::infinity();
      if (head == 3 && (row + key) % 5 == 0) return -60000.0;
      return some;
    };
    const auto gradients = [&](std::int64_t row_stride, std::int64_t offset) {
      const std::int64_t head_stride = drawn.n_q * row_stride;
      check::Tensor bias(gpu_memory(),
                         {nullptr,
                          drawn.dtype,
                          {drawn.batch, drawn.heads, drawn.n_q, drawn.n_k},
                          {drawn.heads * head_stride, head_stride, row_stride, 1}},
                         offset);
      bias.fill(value);
      bias.upload();
      BackwardArgs args;
      args.problem = data.device_problem();
      args.problem.mask.bias = bias.device_view();
      ForwardArgs forward_args;
      forward_args.problem = args.problem;
      forward_args.out = out.device_view();
      forward_args.lse = lse.device_view();
      runner.forward(forward_args);
      check::Tensor d_q = data.output_like_q(drawn.d), d_k = data.output_like_k(drawn.d);
      check::Tensor d_v = data.output_like_k(drawn.d_v);
      args.out = out.device_view();
      args.lse = lse.device_view();
      args.d_out = data.d_out().device_view();
      args.d_q = d_q.device_view();
      args.d_k = d_k.device_view();
      args.d_v = d_v.device_view();
      runner.backward(args);
      std::vector<std::vector<std::byte>> bytes;
      for (check::Tensor* tensor : {&d_q, &d_k, &d_v}) {
        tensor->download();
        bytes.push_back(tensor->bytes());
      }
      return bytes;
    };
    const auto read = gradients(drawn.n_k, 0);
    EXPECT_EQ(gradients(drawn.n_k + 1, 0), read);
    EXPECT_EQ(gradients(drawn.n_k + 5, 4), read);  // aligned to 8 bytes alone
    EXPECT_EQ(gradients(drawn.n_k + 1, 1), read);
  }
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
