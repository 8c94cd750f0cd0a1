// The random problems: reproducible, valid, and drawn over the whole contract.
#include "check/case.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "check/case_data.h"
#include "check/random.h"
#include "core/device_memory.h"
#include "core/validate.h"

namespace dspattn::check {
namespace {

TEST(Random, IsTheSameEverywhere) {
  Random random(1, 2);
  EXPECT_EQ(random.bits(), 0x481c920d996fce04u);
  EXPECT_EQ(random.bits(), 0x45755bbde008fe9bu);
  EXPECT_NE(Random(2, 1).bits(), Random(1, 2).bits());
  double sum = 0, squares = 0;
  for (int i = 0; i < 20000; ++i) {
    const double value = random.bell();
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / 20000, 0.0, 0.03);
  EXPECT_NEAR(squares / 20000, 1.0, 0.03);
}

TEST(Case, IsTheSameEverywhere) {
  const Case drawn = draw_case(20240607, 8);
  EXPECT_EQ(describe(drawn),
            "backward bf16 17:20 consecutive batch=3 heads=1/1 n_q=138 n_k=138 d=42 d_v=42 allowed=[1,heads,1,n_k] "
            "layout=padded,padded,bnhd,bnhd nan_in_k soft_cap=10000 sinks d_lse d_sinks");
  const CaseData data(drawn, {}, core::host_memory());
  EXPECT_EQ(data.q().at(0, 0, 0, 0), 0x1.1p-1);
  EXPECT_EQ(data.v().at(0, 0, 1, 0), -0x1.0cp-4);
}

TEST(Case, EveryDrawIsAValidProblem) {
  DrawLimits limits;
  limits.max_work = 200'000;
  for (std::int64_t index = 0; index < 400; ++index) {
    const Case drawn = draw_case(11, index, limits);
    const CaseData data(drawn, {}, core::host_memory());
    EXPECT_EQ(core::problem_reasons(data.device_problem()), std::vector<std::string>{}) << describe(drawn);
    EXPECT_EQ(core::problem_reasons(data.host_problem()), std::vector<std::string>{}) << describe(drawn);
  }
}

TEST(Case, TheWholeContractIsDrawn) {
  std::map<std::string, std::function<bool(const Case&)>> parts{
      {"forward", [](const Case& c) { return c.pass == Pass::forward; }},
      {"backward", [](const Case& c) { return c.pass == Pass::backward; }},
      {"fp32", [](const Case& c) { return c.dtype == DType::f32; }},
      {"fp16", [](const Case& c) { return c.dtype == DType::f16; }},
      {"bf16", [](const Case& c) { return c.dtype == DType::bf16; }},
      {"2:4",
       [](const Case& c) {
         return c.pattern == Pattern{2, 4};
       }},
      {"1:2",
       [](const Case& c) {
         return c.pattern == Pattern{1, 2};
       }},
      {"dense", [](const Case& c) { return c.pattern == Pattern::dense(); }},
      {"odd group", [](const Case& c) { return c.pattern.group % 2 == 1 && !c.pattern.is_dense(); }},
      {"interleaved", [](const Case& c) { return c.grouping == Grouping::interleaved; }},
      {"consecutive", [](const Case& c) { return c.grouping == Grouping::consecutive; }},
      {"empty batch", [](const Case& c) { return c.batch == 0; }},
      {"no query", [](const Case& c) { return c.n_q == 0; }},
      {"no key", [](const Case& c) { return c.n_k == 0; }},
      {"long", [](const Case& c) { return c.n_k > 280; }},
      {"cross", [](const Case& c) { return c.n_q != c.n_k; }},
      {"one query", [](const Case& c) { return c.n_q == 1 && c.n_k > 1; }},
      {"grouped queries", [](const Case& c) { return c.kv_heads > 1 && c.heads > c.kv_heads; }},
      {"one kv head", [](const Case& c) { return c.kv_heads == 1 && c.heads > 1; }},
      {"d != d_v", [](const Case& c) { return c.d != c.d_v; }},
      {"d = 256", [](const Case& c) { return c.d == 256; }},
      {"d = 1", [](const Case& c) { return c.d == 1; }},
      {"packed", [](const Case& c) { return c.packed; }},
      {"packed tail", [](const Case& c) { return c.tail_q > 0 && c.tail_k > 0; }},
      {"causal bottom right", [](const Case& c) { return c.causal && c.alignment == Alignment::bottom_right; }},
      {"causal top left", [](const Case& c) { return c.causal && c.alignment == Alignment::top_left; }},
      {"offset before the keys", [](const Case& c) { return c.causal && c.offset < 0; }},
      {"offset past the keys", [](const Case& c) { return c.window_left && c.offset > c.n_k; }},
      {"windows", [](const Case& c) { return c.window_left && c.window_right; }},
      {"key lengths", [](const Case& c) { return !c.key_lengths.empty(); }},
      {"allowed and bias", [](const Case& c) { return c.allowed && c.bias; }},
      {"full bias", [](const Case& c) { return c.bias && c.bias->one == std::array<bool, 4>{}; }},
      {"lowest bias", [](const Case& c) { return c.lowest_bias; }},
      {"extreme bias", [](const Case& c) { return c.extreme_bias; }},
      {"extreme scale with ordinary scores", [](const Case& c) { return c.extreme_scale && c.magnitude_k != 1; }},
      {"tiny scale", [](const Case& c) { return c.scale && *c.scale < 1e-30; }},
      {"huge scale", [](const Case& c) { return c.scale && *c.scale > 1e30; }},
      {"exact at an extreme scale", [](const Case& c) { return c.extreme_scale && c.integers && c.bias; }},
      {"scale that fp16 cannot hold",
       [](const Case& c) { return c.dtype == DType::f16 && c.scale && *c.scale > 65504; }},
      {"strided cumulative lengths", [](const Case& c) { return c.cu_stride > 1; }},
      {"strided key lengths", [](const Case& c) { return c.key_lengths_stride > 1; }},
      {"expanded key lengths", [](const Case& c) { return c.key_lengths_stride == 0 && c.batch > 1; }},
      {"many rows of no sequence", [](const Case& c) { return c.tail_q > 40; }},
      {"NaN in backward", [](const Case& c) { return c.nan_in_k && c.pass == Pass::backward; }},
      {"scale", [](const Case& c) { return c.scale.has_value(); }},
      {"default scale", [](const Case& c) { return !c.scale; }},
      {"padded", [](const Case& c) { return c.q_layout == Layout::padded; }},
      {"bnhd out", [](const Case& c) { return c.out_layout == Layout::bnhd; }},
      {"integers", [](const Case& c) { return c.integers; }},
      {"NaN in k", [](const Case& c) { return c.nan_in_k; }},
      {"NaN in q", [](const Case& c) { return c.nan_in_q; }},
      {"equal scores", [](const Case& c) { return c.magnitude == 0; }},
      {"scores of thousands", [](const Case& c) { return c.magnitude > 1000; }},
      {"fp32 results of bf16", [](const Case& c) { return c.fp32_results && c.dtype == DType::bf16; }},
      {"mean", [](const Case& c) { return c.rest == Rest::mean && !c.pattern.is_dense(); }},
      {"mean with masks", [](const Case& c) { return c.rest == Rest::mean && c.allowed && c.bias; }},
      {"shared", [](const Case& c) { return c.choice == Choice::shared && c.heads > c.kv_heads; }},
      {"shared by many", [](const Case& c) { return c.choice == Choice::shared && c.heads > 16 * c.kv_heads; }},
      {"shared and mean", [](const Case& c) { return c.choice == Choice::shared && c.rest == Rest::mean; }},
      {"mean beside NaN", [](const Case& c) { return c.rest == Rest::mean && c.nan_past_length; }},
      {"dropout by numbers", [](const Case& c) { return c.dropout > 0 && !c.dropout_state; }},
      {"dropout by state in backward", [](const Case& c) { return c.dropout_state && c.pass == Pass::backward; }},
      {"soft cap with bias", [](const Case& c) { return c.soft_cap && c.bias; }},
      {"sinks", [](const Case& c) { return c.sinks; }},
      {"gradient of sinks", [](const Case& c) { return c.d_sinks; }},
      {"gradient of a broadcast bias", [](const Case& c) { return c.d_bias && c.bias->one[0] && c.bias->one[2]; }},
      {"gradient through the LSE", [](const Case& c) { return c.d_lse; }},
      {"no LSE", [](const Case& c) { return !c.want_lse; }},
  };
  std::map<std::string, int> counts;
  for (std::int64_t index = 0; index < 2000; ++index) {
    const Case drawn = draw_case(5, index);
    for (const auto& [name, holds] : parts) counts[name] += holds(drawn);
    EXPECT_LE(drawn.n_k, 300);
    EXPECT_LE(drawn.n_q, 300);
    for (int dim = 0; dim < 4; ++dim) {
      if (drawn.bias) counts["bias broadcast " + std::to_string(dim)] += drawn.bias->one[static_cast<std::size_t>(dim)];
    }
  }
  for (const auto& [name, holds] : parts) EXPECT_GT(counts[name], 0) << name;
  for (int dim = 0; dim < 4; ++dim) EXPECT_GT(counts["bias broadcast " + std::to_string(dim)], 0);
}

TEST(Case, LimitsAreKept) {
  DrawLimits limits;
  limits.pass = Pass::forward;
  limits.dtype = DType::bf16;
  limits.pattern = Pattern{2, 4};
  limits.grouping = Grouping::interleaved;
  limits.head_dim = 64;
  limits.max_n = 40;
  for (std::int64_t index = 0; index < 200; ++index) {
    const Case drawn = draw_case(1, index, limits);
    limits.max_queries = 1 + index % 20;
    const std::int64_t queries = draw_case(1, index, limits).n_q;
    EXPECT_TRUE(queries >= 1 && queries <= *limits.max_queries) << queries;
    limits.max_queries.reset();
    EXPECT_TRUE(drawn.pass == Pass::forward && drawn.dtype == DType::bf16 && drawn.pattern == (Pattern{2, 4}) &&
                drawn.grouping == Grouping::interleaved && drawn.d == 64 && drawn.d_v == 64 && drawn.n_q <= 40 &&
                drawn.n_k <= 40)
        << describe(drawn);
    limits.rest = Rest::mean;
    EXPECT_EQ(draw_case(1, index, limits).rest, Rest::mean);
    limits.rest = Rest::drop;
    EXPECT_EQ(draw_case(1, index, limits).rest, Rest::drop);
  }
}

}  // namespace
}  // namespace dspattn::check
