// The fused forward's results in fp32, as parts that are to be merged by their log-sum-exps have them: every variant
// and every way in which an item ends.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>

#include "check/case_data.h"
#include "check/check.h"
#include "cuda/device/facts.h"
#include "cuda/fused_rows.h"
#include "cuda/sm90/forward/rows.h"

namespace dspattn {
namespace {

using check::Case;

class PartialRow : public Robust {
 protected:
  Case problem(std::int64_t heads, std::int64_t n_q, std::int64_t n_k) const {
    Case drawn = row().problem(heads, n_q, n_k);
    drawn.fp32_results = true;
    return drawn;
  }
};

// Rows that are not all there, and all four of whole and partial, full and causal key blocks.
TEST_P(PartialRow, EveryVariant) {
  Case causal = problem(2, 150, 300);
  causal.causal = true;
  expect_right(causal);
  expect_right(problem(1, 512, 384), false);  // three warpgroups at d = 64, pairs from d = 96 on
}

// A CTA's second item begins after the first one's results; rows without a key are zeros of four bytes.
TEST_P(PartialRow, ManyItemsAndEmptyOnes) {
  Case many = problem(cuda::device_facts(0).multiprocessors + 1, 20, 140);
  expect_as_few_at_a_time(many, false);
  Case lengths = problem(1, 70, 200);
  lengths.batch = 3;
  lengths.key_lengths = {200, 0, 90};
  lengths.nan_past_length = true;
  expect_right(lengths);
}

TEST_P(PartialRow, Means) {
  Case drawn = problem(2, 140, 300);
  drawn.rest = Rest::mean;
  drawn.causal = true;
  expect_right(drawn);
}

// They are not 16-bit results in wider elements.
TEST_P(PartialRow, HoldsMoreThanSixteenBits) {
  const Case drawn = problem(1, 40, 300);
  const check::CaseData data(drawn, kGpu, gpu_memory());
  check::Tensor out = data.output_like_q(drawn.d_v);
  ForwardArgs args;
  args.problem = data.device_problem();
  args.out = out.device_view();
  check::library_runner(gpu_memory(), row().name, {}).forward(args);
  out.download();
  const std::uint32_t below = row().dtype == DType::bf16 ? 0xffff : 0x1fff;  // a 16-bit mantissa
  std::int64_t finer = 0;
  for (std::int64_t i = 0; i < drawn.n_q; ++i) {
    for (std::int64_t c = 0; c < drawn.d_v; ++c) {
      finer += (std::bit_cast<std::uint32_t>(static_cast<float>(out.at(0, 0, i, c))) & below) != 0 ? 1 : 0;
    }
  }
  EXPECT_GT(finer, drawn.n_q * drawn.d_v * 9 / 10);
}

INSTANTIATE_TEST_SUITE_P(Table, PartialRow, ::testing::ValuesIn(names_of(cuda::sm90::fused_rows())),
                         name_of<std::string>);

}  // namespace
}  // namespace dspattn
