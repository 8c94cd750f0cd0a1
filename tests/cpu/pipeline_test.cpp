// The pipeline's functions on the CPU against the oracle, the codec and their own promises.
#include "dspattn/pipeline.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/half.h"
#include "cpu/pipeline_case.h"
#include "dspattn/nm_matrix.h"
#include "dspattn/workspace.h"

namespace dspattn {
namespace {

using test::PipelineCase;
using test::PipelineProblem;
using test::PipelineResult;

TEST(PipelineCpu, AgreesWithTheOracle) {
  for (const PipelineCase& drawn : test::pipeline_cases()) {
    const PipelineProblem problem(drawn);
    const PipelineResult result = problem.run({});
    for (const std::string& failure : test::oracle_failures(problem, result)) {
      ADD_FAILURE() << test::describe(drawn) << ": " << failure;
    }
    const PipelineResult chained = problem.run({}, true);
    EXPECT_EQ(chained.out, result.out) << test::describe(drawn);
    EXPECT_EQ(chained.lse, result.lse) << test::describe(drawn);
  }
}

// Dense integer scores pruned and encoded by the codec give the same metadata and nonzeros.
TEST(PipelineCpu, WritesWhatTheCodecWrites) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const Grouping grouping : {Grouping::consecutive, Grouping::interleaved}) {
      const Pattern pattern = dtype == DType::f32 ? Pattern{1, 2} : Pattern{2, 4};
      const PipelineProblem problem(
          {.dtype = dtype, .pattern = pattern, .grouping = grouping, .n_q = 64, .n_k = 256, .d = 16});
      const PipelineResult result = problem.run({});
      const cpu::Reference reference = cpu::reference_forward(problem.oracle_problem());
      std::vector<std::byte> dense(static_cast<std::size_t>(64 * 256) * size_bytes(dtype));
      for (std::int64_t i = 0; i < 64 * 256; ++i) {
        core::store_element(dense.data(), dtype, i, reference.scores.values[static_cast<std::size_t>(i)]);
      }
      const NmMatrix pruned = prune({dense.data(), dtype, {64, 256}}, pattern, grouping);
      EXPECT_EQ(encode_metadata(pruned), result.metadata);
      EXPECT_EQ(std::vector<std::byte>(pruned.values().begin(), pruned.values().end()), result.scores);
    }
  }
}

TEST(PipelineCpu, ANanScoreMakesItsRowNanAndNoOther) {
  PipelineProblem problem({.dtype = DType::f32, .pattern = {1, 2}, .n_q = 40, .n_k = 64, .d = 8, .d_v = 8});
  core::store_element(problem.q.data(), DType::f32, 7 * 8 + 3, std::numeric_limits<double>::quiet_NaN());
  const PipelineResult result = problem.run({});
  for (std::int64_t row = 0; row < 40; ++row) {
    for (std::int64_t c = 0; c < 8; ++c) {
      EXPECT_EQ(std::isnan(core::load_element(result.out.data(), DType::f32, row * 8 + c)), row == 7) << row;
    }
  }
}

// One query, four keys, 1:2: what is stored of scores that the type cannot hold, and of masked ones.
std::vector<double> stored_scores(DType dtype, const std::vector<double>& q_and_k, std::vector<float> bias,
                                  double scale) {
  std::vector<std::uint16_t> q(4), k(8);
  std::vector<float> wide_q(4), wide_k(8);
  const bool wide = dtype == DType::f32;
  void* q_data = wide ? static_cast<void*>(wide_q.data()) : q.data();
  void* k_data = wide ? static_cast<void*>(wide_k.data()) : k.data();
  core::store_element(q_data, dtype, 0, q_and_k[0]);
  for (int i = 0; i < 4; ++i) core::store_element(k_data, dtype, i, q_and_k[static_cast<std::size_t>(i) + 1]);
  alignas(16) unsigned char nonzeros[32 * 16 * 4] = {}, metadata[4096] = {};
  QkPruneArgs args;
  args.q = {q_data, dtype, {1, 1, 1, 1}};
  args.k = {k_data, dtype, {1, 1, 4, 1}};
  args.mask.bias = {bias.data(), DType::f32, {1, 1, 1, 4}};
  args.scale = scale;
  args.scores = {{dtype, {1, 2}, Grouping::consecutive, 1, 1, 1, 4}, nonzeros, metadata};
  qk_prune(args);
  return {core::load_element(nonzeros, dtype, 0), core::load_element(nonzeros, dtype, 1)};
}

TEST(PipelineCpu, FiniteScoresAreStoredFiniteAndMaskedNanIsMasked) {
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const double largest = core::largest_of(dtype);
    EXPECT_EQ(stored_scores(dtype, {1, 1, 1, 1, 1}, {kLowest, kLowest, -kLowest, 0}, 0.125),
              (std::vector<double>{-largest, largest}))
        << name(dtype);
    // 1e38 / 0.125 is beyond fp32, and so is its half: no tie.
    const std::vector<double> apart = stored_scores(dtype, {1, 1, 1, 1, 1}, {-1e38f, -5e37f, 5e37f, 1e38f}, 0.125);
    if (dtype == DType::f32) {
      EXPECT_FLOAT_EQ(static_cast<float>(apart[0]), -5e37f);
      EXPECT_FLOAT_EQ(static_cast<float>(apart[1]), 1e38f);
    }
    EXPECT_EQ(stored_scores(dtype, {1, kNan, 2, kNan, kNan}, {-kInf, 0, -kInf, -kInf}, 1.0),
              (std::vector<double>{2, -static_cast<double>(kInf)}))
        << name(dtype);
  }
  EXPECT_EQ(stored_scores(DType::f16, {300, 300, 1, -300, -300}, {0, 0, 0, 0}, 1.0),
            (std::vector<double>{65504, -65504}));
}

TEST(PipelineCpu, EmptyProblemsGiveEmptyOrZeroResults) {
  const PipelineResult no_keys = PipelineProblem({.n_q = 5, .n_k = 0, .d = 8, .d_v = 4}).run({});
  for (std::int64_t i = 0; i < 5 * 4; ++i) EXPECT_EQ(core::load_element(no_keys.out.data(), DType::bf16, i), 0.0);
  for (const float lse : no_keys.lse) EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(PipelineProblem({.n_q = 0, .n_k = 9}).run({}).out.empty());
  EXPECT_TRUE(PipelineProblem({.batch = 0, .n_q = 4, .n_k = 9}).run({}).out.empty());
}

std::vector<std::string> reasons_of(const QkPruneArgs& args) {
  try {
    qk_prune(args);
  } catch (const Error& error) {
    return error.reasons();
  }
  return {};
}

TEST(PipelineCpu, RefusalsNameTheArgumentAndEveryReason) {
  std::vector<float> q(64), scores(4096);
  QkPruneArgs args;
  args.q = {q.data(), DType::f32, {1, 1, 4, 16}};
  args.k = args.q;
  args.scores.shape = {DType::f32, {2, 4}, Grouping::consecutive, 1, 2, 4, 4};
  args.scores.nonzeros = scores.data();
  args.run.stream = &q;
  const std::vector<std::string> reasons = reasons_of(args);
  ASSERT_EQ(reasons.size(), 2u);
  EXPECT_NE(reasons[0].find("stream: expected null"), std::string::npos) << reasons[0];
  EXPECT_NE(reasons[1].find("scores.shape.pattern: expected 1:2 for fp32, got 2:4"), std::string::npos) << reasons[1];

  args.run.stream = nullptr;
  args.scores.shape.pattern = {1, 2};
  const std::vector<std::string> memory = reasons_of(args);
  ASSERT_EQ(memory.size(), 1u);
  EXPECT_NE(memory[0].find("scores.metadata: expected memory"), std::string::npos) << memory[0];

  const BlockMask mask = make_block_mask(4, 4, 64, {{0}});
  args.blocks = mask.view();
  args.scores.shape.grouping = Grouping::interleaved;
  args.scores.shape.block = 64;
  args.scores.shape.width = 1;
  args.scores.metadata = scores.data() + 1024;
  const std::vector<std::string> blocks = reasons_of(args);
  ASSERT_FALSE(blocks.empty());
  EXPECT_NE(blocks[0].find("blocks.block: expected 128 for interleaved"), std::string::npos) << blocks[0];
}

TEST(PipelineCpu, LengthsOfTheProductAreReadAndRefused) {
  alignas(16) float weights[64] = {}, metadata[64] = {};
  float v[4] = {}, out[4] = {};
  std::int32_t length = 5;
  PvSparseArgs args;
  args.weights = {{DType::f32, {1, 2}, Grouping::consecutive, 1, 1, 1, 4}, weights, metadata};
  args.v = {v, DType::f32, {1, 1, 4, 1}};
  args.out = {out, DType::f32, {1, 1, 1, 1}};
  args.key_lengths = {&length, DType::i32, {1}};
  for (const std::int32_t wrong : {5, -1}) {
    length = wrong;
    try {
      pv_sparse(args);
      FAIL() << wrong;
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), "key_lengths[0]: expected a length from 0 to n_k = 4, got " + std::to_string(wrong));
    }
  }
}

TEST(PipelineCpu, TheChainRefusesWhatItCannotDo) {
  std::vector<float> data(4 * 16);
  ForwardArgs args;
  args.problem.q = args.problem.k = args.problem.v = {data.data(), DType::f32, {1, 1, 4, 16}};
  std::vector<float> out(4 * 16);
  args.out = {out.data(), DType::f32, {1, 1, 4, 16}};
  args.problem.pattern = {3, 8};
  EXPECT_THROW(pipeline_workspace_bytes(args), Error);
  args.problem.pattern = {1, 2};
  EXPECT_GT(pipeline_workspace_bytes(args), 0u);
  EXPECT_THROW(pipeline_forward(args), Error) << "no workspace";
}

// Parts of a result in fp32, of 16-bit inputs: rounded, they are the chain's 16-bit results.
TEST(PipelineCpu, TheChainWritesFp32Results) {
  const PipelineProblem problem({.dtype = DType::bf16, .n_q = 5, .n_k = 40, .d = 8, .d_v = 8});
  const PipelineResult narrow = problem.run({}, true);
  std::vector<float> out(5 * 8);
  ForwardArgs args{problem.oracle_problem(), {out.data(), DType::f32, {1, 1, 5, 8}}, {}, {}};
  Workspace workspace;
  workspace.attach(args.run, {}, pipeline_workspace_bytes(args));
  pipeline_forward(args);
  int finer = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double rounded = core::decode_bf16(core::encode_bf16(out[i]));
    EXPECT_EQ(rounded, core::load_element(narrow.out.data(), DType::bf16, static_cast<std::int64_t>(i)));
    finer += rounded != out[i] ? 1 : 0;
  }
  EXPECT_GT(finer, 30);
}

TEST(SparseShape, PadsToWholeMetadataTiles) {
  SparseShape shape{DType::bf16, {2, 4}, Grouping::consecutive, 2, 3, 33, 65};
  EXPECT_EQ(shape.rows(), 64);
  EXPECT_EQ(shape.places(), 96);
  EXPECT_EQ(shape.nonzeros_bytes(), 6u * 64u * 48u * 2u);
  EXPECT_EQ(shape.metadata_bytes(), 6u * 64u * 6u * 2u);
  shape.grouping = Grouping::interleaved;
  EXPECT_EQ(shape.places(), 128);
  shape = {DType::f32, {1, 2}, Grouping::consecutive, 1, 1, 32, 17};
  EXPECT_EQ(shape.places(), 32);
  EXPECT_EQ(shape.metadata_bytes(), 32u * 4u * 2u);
}

}  // namespace
}  // namespace dspattn
