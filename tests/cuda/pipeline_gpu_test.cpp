// The pipeline's kernels on a GPU: against the oracle, and byte for byte against the CPU where sums are exact.
//   DSPATTN_PIPELINE_CASES   random problems of each type and pattern (default 60)
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <mutex>

#include "check/check.h"
#include "cpu/parallel.h"
#include "cpu/pipeline_case.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace {

using test::PipelineCase;
using test::PipelineProblem;
using test::PipelineResult;

constexpr Device kGpu{DeviceType::cuda, 0};

class PipelineGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      core::DeviceBuffer probe(api::memory_of(kGpu), 1);
    } catch (const Error& error) {
      GTEST_SKIP() << "no GPU: " << error.what();
    }
  }
};

// Metadata and, where sums are exact, scores byte for byte; results to within rounding, of the functions and the chain.
void expect_results_of_the_cpu(const std::vector<PipelineCase>& cases) {
  for (const PipelineCase& drawn : cases) {
    const PipelineProblem problem(drawn);
    const PipelineResult gpu = problem.run(kGpu), cpu = problem.run({}), chained = problem.run(kGpu, true);
    if (drawn.blocks.empty()) {  // slots that a block mask does not fill are nobody's
      EXPECT_EQ(gpu.metadata, cpu.metadata) << test::describe(drawn);
      if (drawn.d == 64 && !drawn.bias) {
        EXPECT_EQ(gpu.scores, cpu.scores) << test::describe(drawn);
      }
    }
    double worst = 0;
    const std::int64_t count = drawn.batch * drawn.heads * drawn.n_q * drawn.d_v;
    for (std::int64_t i = 0; i < count; ++i) {
      const double want = core::load_element(cpu.out.data(), drawn.dtype, i);
      for (const PipelineResult* result : {&gpu, &chained}) {
        const double error = std::abs(core::load_element(result->out.data(), drawn.dtype, i) - want);
        if (!(error <= worst)) worst = error;
      }
    }
    // Scores of d = 40 round to either neighbour, up to eight bits below 32: a weight is off by that much at most.
    EXPECT_LE(worst, drawn.dtype == DType::bf16 ? 0x1p-4 : 0x1p-7) << test::describe(drawn);
  }
}

TEST_F(PipelineGpu, AgreesWithTheOracle) {
  for (const PipelineCase& drawn : test::pipeline_cases()) {
    const PipelineProblem problem(drawn);
    for (const bool chained : {false, true}) {
      PipelineResult result = problem.run(kGpu, chained);
      if (chained) result.metadata.clear();
      for (const std::string& failure : test::oracle_failures(problem, result, drawn.dtype == DType::f32)) {
        ADD_FAILURE() << test::describe(drawn) << (chained ? " chained: " : ": ") << failure;
      }
    }
  }
}

// Padding included: rows to 32 and places to whole words hold masked scores and valid codes on either device. Slots
// that a block mask does not fill are nobody's.
TEST_F(PipelineGpu, WritesTheBytesOfTheCpu) {
  for (const PipelineCase& drawn : test::pipeline_cases()) {
    if (!drawn.integers || !drawn.blocks.empty()) continue;
    const PipelineProblem problem(drawn);
    const PipelineResult gpu = problem.run(kGpu), cpu = problem.run({});
    EXPECT_EQ(gpu.metadata, cpu.metadata) << test::describe(drawn);
    // d = 64 and 256 scale by a power of two: the scores are exact, too.
    if (drawn.d == 64 && !drawn.bias) {
      EXPECT_EQ(gpu.scores, cpu.scores) << test::describe(drawn);
    }
  }
}

// Long enough for the kernels that use Hopper's own instructions; whole tiles, ragged ends, masks, heads that share K.
TEST_F(PipelineGpu, LongMatricesAgreeWithTheCpu) {
  std::vector<PipelineCase> cases;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const Grouping grouping : {Grouping::consecutive, Grouping::interleaved}) {
      PipelineCase plain{.dtype = dtype, .pattern = {1, 2}, .grouping = grouping};
      if (dtype != DType::f32) plain.pattern = {2, 4};
      plain.n_q = 1280;
      plain.n_k = 1024;
      plain.heads = 2;
      cases.push_back(plain);
      PipelineCase ragged = plain;
      ragged.n_q = 1201;
      ragged.n_k = 1187;
      ragged.batch = 2;
      ragged.heads = ragged.kv_heads = 1;
      ragged.key_lengths = {1187, 300};
      ragged.d = 40;
      ragged.d_v = 56;
      cases.push_back(ragged);
      PipelineCase causal = ragged;
      causal.causal = true;
      causal.d = causal.d_v = 64;
      causal.pattern = {1, 2};
      cases.push_back(causal);
      PipelineCase biased = plain;
      biased.n_q = 1024;
      biased.bias = true;
      cases.push_back(biased);
      PipelineCase blocked = plain;  // every block row its own blocks, and another number of them
      blocked.n_q = 1090;
      blocked.n_k = 1000;
      blocked.block = grouping == Grouping::interleaved ? 128 : 64;
      for (int row = 0; row * blocked.block < blocked.n_q; ++row) {
        std::vector<std::int32_t>& columns = blocked.blocks.emplace_back();
        for (int column = row % 3; column * blocked.block < blocked.n_k; column += 1 + row % 4)
          columns.push_back(column);
      }
      cases.push_back(blocked);
    }
  }
  expect_results_of_the_cpu(cases);
}

// One or two tiles of each kernel: what compute-sanitizer can take apart in reasonable time.
TEST_F(PipelineGpu, EveryKernelOnSmallProblems) {
  std::vector<PipelineCase> cases;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    PipelineCase plain{.dtype = dtype, .pattern = {1, 2}};
    if (dtype != DType::f32) plain.pattern = {2, 4};
    plain.batch = plain.heads = plain.kv_heads = 1;
    plain.n_k = 160;
    for (const std::int64_t rows : {96, 192, 256}) {  // as many rows a CTA of pv_sparse has
      plain.n_q = rows;
      cases.push_back(plain);
    }
    PipelineCase shorter = plain;
    shorter.n_q = 70;
    shorter.key_lengths = {100};
    cases.push_back(shorter);
    PipelineCase causal = plain;
    causal.n_q = 160;
    causal.causal = true;
    cases.push_back(causal);
    PipelineCase wide = plain;  // wider than Hopper's own kernels serve
    wide.n_q = 64;
    wide.d = wide.d_v = 128;
    cases.push_back(wide);
    for (const int block : {64, 128}) {
      PipelineCase blocked = plain;
      blocked.n_q = 192;
      blocked.block = block;
      for (int row = 0; row * block < blocked.n_q; ++row) blocked.blocks.push_back({row % 2, row % 2 + 1});
      if (block == 128) blocked.n_k = 320;
      cases.push_back(blocked);
    }
  }
  expect_results_of_the_cpu(cases);
}

TEST_F(PipelineGpu, SoftmaxTakesRowsOfAnyLength) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t n_k : {8, 250, 384, 1000, 2048, 4097, 9000, 70000, 500000}) {
      const SparseShape shape{dtype, {1, 2}, Grouping::consecutive, 1, 2, 5, n_k};
      std::mt19937 engine(static_cast<std::uint32_t>(n_k));
      std::normal_distribution<double> normal(0, 3);
      std::vector<std::byte> scores(shape.nonzeros_bytes());
      const std::int64_t count = shape.matrices() * shape.rows() * shape.nonzeros_per_row();
      for (std::int64_t i = 0; i < count; ++i) core::store_element(scores.data(), dtype, i, normal(engine));
      std::vector<std::byte> metadata(shape.metadata_bytes());
      std::vector<std::byte> expected = scores;
      std::vector<float> lse(10), expected_lse(10);
      nonzero_softmax(
          {.matrices = {shape, expected.data(), metadata.data()}, .lse = {expected_lse.data(), DType::f32, {1, 2, 5}}});
      core::DeviceMemory& memory = api::memory_of(kGpu);
      core::DeviceBuffer nonzeros(memory, scores.size()), codes(memory, metadata.size()), dlse(memory, 40);
      nonzeros.upload(scores.data());
      nonzero_softmax({.device = kGpu,
                       .matrices = {shape, nonzeros.data(), codes.data()},
                       .lse = {dlse.data(), DType::f32, {1, 2, 5}}});
      nonzeros.download(scores.data());
      dlse.download(lse.data());
      for (std::size_t i = 0; i < lse.size(); ++i)
        EXPECT_NEAR(lse[i], expected_lse[i], 2e-5) << name(dtype) << " " << n_k;
      double worst = 0;
      for (std::int64_t i = 0; i < count; ++i) {
        const double want = core::load_element(expected.data(), dtype, i);
        const double got = core::load_element(scores.data(), dtype, i);
        // fp16 is subnormal below 2^-14: there one unit is 2^-24.
        worst = std::max(worst, (std::abs(got - want) - (dtype == DType::f16 ? 0x1p-24 : 0.0)) / (want + 1e-9));
        if (!(std::abs(got - want) <= 1e30)) worst = std::numeric_limits<double>::infinity();
      }
      EXPECT_LE(worst, dtype == DType::f32 ? 1e-5 : 1.01 * core::epsilon_of(dtype)) << name(dtype) << " " << n_k;
    }
  }
}

TEST_F(PipelineGpu, ANanScoreMakesItsRowNanAndNoOther) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t bad_key : {0, 1, 2, 3, 50}) {
      PipelineProblem problem(
          {.dtype = dtype, .pattern = {1, 2}, .n_q = 40, .n_k = 64, .d = 8, .d_v = 8, .bias = true});
      for (float& value : problem.bias) value = 0;
      problem.bias[static_cast<std::size_t>(7 * 64 + bad_key)] = std::numeric_limits<float>::quiet_NaN();
      const PipelineResult result = problem.run(kGpu);
      for (std::int64_t row = 0; row < 40; ++row) {
        for (std::int64_t c = 0; c < 8; ++c) {
          EXPECT_EQ(std::isnan(core::load_element(result.out.data(), dtype, row * 8 + c)), row == 7)
              << name(dtype) << " row " << row << " key " << bad_key;
        }
      }
    }
  }
}

TEST_F(PipelineGpu, EmptyProblemsGiveEmptyOrZeroResults) {
  for (const bool chained : {false, true}) {
    const PipelineResult no_keys = PipelineProblem({.n_q = 5, .n_k = 0, .d = 8, .d_v = 4}).run(kGpu, chained);
    for (std::int64_t i = 0; i < 5 * 4; ++i) EXPECT_EQ(core::load_element(no_keys.out.data(), DType::bf16, i), 0.0);
    for (const float lse : no_keys.lse) EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
    EXPECT_TRUE(PipelineProblem({.n_q = 0, .n_k = 9}).run(kGpu, chained).out.empty());
    EXPECT_TRUE(PipelineProblem({.batch = 0, .n_q = 4, .n_k = 9}).run(kGpu, chained).out.empty());
  }
}

// Random problems of the whole contract in the three-part comparison, of each row of the kernel table that this GPU can
// run at all.
TEST_F(PipelineGpu, PassesRandomProblems) {
  struct Kind {
    DType dtype;
    Pattern pattern;
  };
  const std::vector<Kind> kinds{
      {DType::bf16, {2, 4}}, {DType::bf16, {1, 2}}, {DType::f16, {2, 4}}, {DType::f16, {1, 2}}, {DType::f32, {1, 2}}};
  const char* given = std::getenv("DSPATTN_PIPELINE_CASES");
  const std::int64_t wanted = given != nullptr ? std::max(1LL, std::atoll(given)) : 60;
  const std::int64_t draws = std::max<std::int64_t>(800, 14 * wanted);
  for (const std::string kernel : {"sm90_pipeline", "sm80_pipeline"}) {
    bool foreign = false;  // made for other GPUs than this one
    for (const Kind& kind : kinds) {
      check::CheckOptions options;
      options.device = kGpu;
      options.limits.pass = Pass::forward;
      options.limits.dtype = kind.dtype;
      options.limits.pattern = kind.pattern;
      std::mutex mutex;
      std::int64_t served = 0;
      double worst = 0;
      cpu::parallel_for(draws, Execution{}, [&](std::int64_t index) {
        {
          const std::lock_guard lock(mutex);
          if (served >= wanted) return;
        }
        const check::CaseReport report = check::check_case(6, index, kernel, options);
        const std::lock_guard lock(mutex);
        if (!report.served) {
          for (const std::string& reason : report.reasons) {
            foreign = foreign || reason.find("expected compute capability 9.0, got") != std::string::npos;
          }
          return;
        }
        ++served;
        worst = std::max(worst, report.worst);
        for (const std::string& failure : report.failures) {
          ADD_FAILURE() << kernel << " " << name(kind.dtype) << " " << to_string(kind.pattern) << " case " << index
                        << " (" << report.description << "): " << failure;
        }
      });
      if (foreign) {
        EXPECT_EQ(served, 0);
        break;
      }
      EXPECT_GE(served, wanted) << kernel << " " << name(kind.dtype) << " " << to_string(kind.pattern);
      RecordProperty(kernel + "_" + std::string(name(kind.dtype)) + to_string(kind.pattern) + "_worst",
                     std::to_string(worst));
    }
  }
}

// Parts of a result in fp32: by whole sectors, and where rows have no alignment or no multiple of four columns.
TEST_F(PipelineGpu, EveryKernelWritesFp32Results) {
  std::int64_t served = 0;
  for (const std::string kernel : {"sm90_pipeline", "sm80_pipeline"}) {
    for (const std::int64_t d_v : {64, 61, 72}) {
      check::Case drawn;
      drawn.dtype = DType::bf16;
      drawn.pattern = {2, 4};
      drawn.n_q = 70;
      drawn.n_k = 200;
      drawn.d = 64;
      drawn.d_v = d_v;
      drawn.causal = d_v == 64;
      drawn.fp32_results = true;
      check::CheckOptions options;
      options.device = kGpu;
      const check::Runner runner = check::library_runner(api::memory_of(kGpu), kernel, {});
      bool foreign = false;  // Hopper's kernels on another card
      for (const std::string& failure : check::check_drawn(drawn, runner, options).failures) {
        foreign = failure.find("expected compute capability 9.0, got") != std::string::npos;
        if (!foreign) ADD_FAILURE() << kernel << " " << d_v << ": " << failure;
      }
      served += foreign ? 0 : 1;
    }
  }
  EXPECT_GE(served, 3);
}

TEST_F(PipelineGpu, IsARowOfTheKernelTable) {
  bool found = false;
  bool found_hopper = false;
  for (const KernelInfo& info : kernels(Pass::forward)) {
    found = found || info.name == "sm80_pipeline";
    found_hopper = found_hopper || info.name == "sm90_pipeline";
  }
  EXPECT_TRUE(found);
  EXPECT_TRUE(found_hopper);
}

}  // namespace
}  // namespace dspattn
