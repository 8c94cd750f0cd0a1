// The general kernel on a GPU: random problems of the whole contract per type and class of patterns against the oracle
// and beside the CPU kernel, reruns bit for bit (random_problems.h: how many), and a walk over the contract on which no
// problem is refused. Skipped without a GPU of compute capability 8.0 or later.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/geometry.h"
#include "core/half.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/device/facts.h"
#include "cuda/device/memory.h"
#include "cuda/general/plan.h"
#include "cuda/general_classes.h"
#include "dspattn/attention.h"
#include "dspattn/error.h"
#include "dspattn/workspace.h"

namespace dspattn {
namespace {

check::CheckOptions forward_options(const GeneralClass& of, std::int64_t index, bool short_only) {
  check::CheckOptions options = of.options(Pass::forward, index);
  options.beside_cpu = true;
  if (index % 4 == 0) options.limits.head_dim = index % 8 == 0 ? 128 : 64;
  if (index % 4 >= 2 && !short_only) {
    options.limits.max_n = 2049;
    options.limits.max_work = index % 16 == 2 ? 1'200'000'000 : 60'000'000;
  }
  return options;
}

class General : public ::testing::TestWithParam<GeneralClass> {
 protected:
  void SetUp() override {
    if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_P(General, AgreesWithTheOracleAndTheCpuOnRandomProblems) {
  const GeneralClass& of = GetParam();
  expect_agreement(
      of.name, of.kernel(), [&](std::int64_t index, bool short_only) { return forward_options(of, index, short_only); },
      [](const check::Case&) { return true; });
}

TEST_P(General, GivesTheSameBitsOverReruns) {
  check::CheckOptions options = GetParam().options(Pass::forward, 0);
  options.limits.max_n = 1025;
  options.limits.max_work = 300'000'000;
  options.reruns = 50;
  expect_same_bits(GetParam().kernel(), options, 2, [](const check::Case&) { return true; });
}

INSTANTIATE_TEST_SUITE_P(Classes, General, ::testing::ValuesIn(general_classes()), name_of<GeneralClass>);

// The shape for few keys (Scope::brief): problems that the plan gives it.
class GeneralBrief : public General {
 protected:
  void SetUp() override {
    General::SetUp();
    const cuda::general::Shape shape =
        cuda::general::shape_of(GetParam().dtype, cuda::general::Kind::fours, cuda::general::Scope::brief, 64);
    const int of_cta = shape.shared_bytes(shape.warps, 2) + shape.own_bytes + cuda::general::kReservedBytes;
    if (shape.ctas * of_cta > cuda::device_facts(0).shared_bytes + 1024)
      GTEST_SKIP() << "needs 168 KiB of shared memory";
  }
};

TEST_P(GeneralBrief, AgreesWithTheOracle) {
  const GeneralClass& of = GetParam();
  const auto options_of_index = [&](std::int64_t index, bool) {
    check::CheckOptions options = of.options(Pass::forward, index);
    options.limits.head_dim = index % 4 == 0 ? 40 : 64;
    options.limits.max_n = 512;
    return options;
  };
  expect_agreement(of.name, of.kernel(), options_of_index, [](const check::Case& drawn) {
    const check::CaseData data(drawn, {}, core::host_memory());
    Problem problem = data.host_problem();
    problem.device = {DeviceType::cuda, 0};
    if (cuda::blocks::is_empty(core::geometry_of(problem))) return false;
    const TensorView out = cuda::blocks::contiguous_out(problem);
    return cuda::general::plan_forward(problem, out, cuda::device_facts(0)).scope == cuda::general::Scope::brief;
  });
}

std::vector<GeneralClass> brief_classes() {
  std::vector<GeneralClass> found;
  for (const GeneralClass& of : general_classes()) {
    const Pattern pattern = of.patterns[0];
    const bool taken = pattern == Pattern{2, 4} || pattern == Pattern{1, 2} || pattern.is_dense();
    if (of.dtype != DType::f32 && taken) found.push_back(of);
  }
  return found;
}
INSTANTIATE_TEST_SUITE_P(Classes, GeneralBrief, ::testing::ValuesIn(brief_classes()), name_of<GeneralClass>);

// Pages in any order give the bits that one piece gives; keys in no page are hidden.
TEST_P(General, PagesInAnyOrder) {
  const GeneralClass& of = GetParam();
  constexpr std::int64_t kBatch = 2, kHeads = 4, kKeyHeads = 2, kQueries = 70, kPage = 48, kBlocks = 5, kPlaces = 11;
  constexpr std::int64_t kDim = 40, kKeys = kPage * kBlocks;
  const std::size_t element = size_bytes(of.dtype);
  core::DeviceMemory& memory = cuda::memory(0);
  // Small integers, which every type has.
  const auto random = [&](std::int64_t elements, int seed) {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(elements) * element);
    std::uint32_t state = static_cast<std::uint32_t>(seed);
    for (std::int64_t i = 0; i < elements; ++i) {
      state = state * 1664525u + 1013904223u;
      core::store_element(bytes.data(), of.dtype, i, static_cast<double>(state >> 28) - 7.5);
    }
    return bytes;
  };
  const auto upload = [&](const auto& values) {
    core::DeviceBuffer buffer(memory, values.size() * sizeof(values[0]));
    buffer.upload(values.data());
    return buffer;
  };
  const auto q = random(kBatch * kHeads * kQueries * kDim, 1);
  const auto k = random(kBatch * kKeyHeads * kKeys * kDim, 2), v = random(kBatch * kKeyHeads * kKeys * kDim, 3);
  std::vector<std::int32_t> table;
  for (std::int64_t i = 0; i < kBatch * kBlocks; ++i) table.push_back(static_cast<std::int32_t>(4 * i % kPlaces));
  const std::size_t page_bytes = kPage * kDim * element;
  const auto cut = [&](const std::vector<std::uint8_t>& whole) {  // places without a page hold NaN
    std::vector<std::uint8_t> pages(kPlaces * kKeyHeads * page_bytes, 0xFF);
    for (std::size_t b = 0; b < kBatch; ++b) {
      for (std::size_t head = 0; head < kKeyHeads; ++head) {
        for (std::size_t i = 0; i < kBlocks; ++i) {
          const auto place = static_cast<std::size_t>(table[b * kBlocks + i]);
          std::memcpy(pages.data() + (place * kKeyHeads + head) * page_bytes,
                      whole.data() + ((b * kKeyHeads + head) * kBlocks + i) * page_bytes, page_bytes);
        }
      }
    }
    return pages;
  };
  const core::DeviceBuffer gpu_q = upload(q), gpu_k = upload(k), gpu_v = upload(v);
  const core::DeviceBuffer k_pages = upload(cut(k)), v_pages = upload(cut(v));
  std::vector<std::uint8_t> allowed(kBatch * kKeys, 1);  // the second sequence lacks its third page
  std::fill_n(allowed.begin() + kKeys + 2 * kPage, kPage, 0);
  table[kBlocks + 2] = -1;
  const core::DeviceBuffer gpu_table = upload(table), gpu_allowed = upload(allowed);
  const auto run = [&](bool paged) {
    ForwardArgs args;
    args.problem.device = {DeviceType::cuda, 0};
    args.problem.q = {gpu_q.data(), of.dtype, {kBatch, kHeads, kQueries, kDim}};
    args.problem.pattern = of.patterns.front();
    args.problem.mask.causal = true;
    if (paged) {
      args.problem.k = {k_pages.data(), of.dtype, {kPlaces, kKeyHeads, kPage, kDim}};
      args.problem.v = {v_pages.data(), of.dtype, {kPlaces, kKeyHeads, kPage, kDim}};
      args.problem.block_table = {gpu_table.data(), DType::i32, {kBatch, kBlocks}};
    } else {
      args.problem.k = {gpu_k.data(), of.dtype, {kBatch, kKeyHeads, kKeys, kDim}};
      args.problem.v = {gpu_v.data(), of.dtype, {kBatch, kKeyHeads, kKeys, kDim}};
      args.problem.mask.allowed = {gpu_allowed.data(), DType::b8, {kBatch, 1, 1, kKeys}};
    }
    args.run.kernel = of.kernel();
    std::vector<std::uint8_t> out(q.size());
    core::DeviceBuffer gpu_out(memory, out.size());
    args.out = {gpu_out.data(), of.dtype, {kBatch, kHeads, kQueries, kDim}};
    Workspace workspace;
    workspace.attach(args);
    forward(args);
    gpu_out.download(out.data());
    return out;
  };
  EXPECT_EQ(run(true), run(false));
}

// Many heads with few rows, of which a CTA takes several tiles, give the bits that few heads give. Of each head's three
// tiles the first sees no key.
TEST_P(General, ManyShortRowsGiveTheBitsOfFew) {
  const GeneralClass& of = GetParam();
  const std::int64_t few = cuda::device_facts(0).multiprocessors / 2, heads = 12 * few + 1;
  constexpr std::int64_t kQueries = 300, kKeys = 128;
  core::DeviceMemory& memory = cuda::memory(0);
  for (const std::int64_t dim : {64, 128}) {
    const std::size_t row_bytes = static_cast<std::size_t>(dim) * size_bytes(of.dtype);
    const auto upload = [&](std::int64_t rows, std::uint32_t state) {
      std::vector<std::uint8_t> bytes(static_cast<std::size_t>(heads * rows) * row_bytes);
      for (std::int64_t i = 0; i < heads * rows * dim; ++i) {
        state = state * 1664525u + 1013904223u;
        core::store_element(bytes.data(), of.dtype, i, static_cast<double>(state >> 28) - 7.5);
      }
      core::DeviceBuffer buffer(memory, bytes.size());
      buffer.upload(bytes.data());
      return buffer;
    };
    const core::DeviceBuffer q = upload(kQueries, 1), k = upload(kKeys, 2), v = upload(kKeys, 3);
    std::vector<std::uint8_t> together(static_cast<std::size_t>(heads * kQueries) * row_bytes), apart(together.size());
    const core::DeviceBuffer out(memory, together.size());
    const auto run = [&](std::int64_t first, std::int64_t count) {
      ForwardArgs args;
      const auto rows = [&](const core::DeviceBuffer& buffer, std::int64_t n) {
        return TensorView{static_cast<std::uint8_t*>(buffer.data()) + static_cast<std::size_t>(first * n) * row_bytes,
                          of.dtype,
                          {1, count, n, dim}};
      };
      args.problem.device = {DeviceType::cuda, 0};
      args.problem.q = rows(q, kQueries);
      args.problem.k = rows(k, kKeys);
      args.problem.v = rows(v, kKeys);
      args.problem.pattern = of.patterns.front();
      args.problem.mask.causal = true;
      args.run.kernel = of.kernel();
      args.out = rows(out, kQueries);
      forward(args);
    };
    run(0, heads);
    out.download(together.data());
    for (std::int64_t first = 0; first < heads; first += few) run(first, std::min(few, heads - first));
    out.download(apart.data());
    EXPECT_EQ(together, apart) << "d " << dim;
  }
}

// Threads whose plans for one kernel differ in shared memory, as those of few rows and of many do for fp32 at d = 256:
// none takes another's permission for it.
TEST(GeneralTable, ThreadsLaunchAKernelInTwoShapes) {
  if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  constexpr std::int64_t kDim = 256, kKeys = 16, kRows = 100;
  constexpr int kLaunches = 25;
  const auto work = [&](std::int64_t rows) {
    core::DeviceMemory& memory = cuda::memory(0);
    const std::vector<float> ones(static_cast<std::size_t>(kRows * kDim), 1.0f);
    std::vector<float> found(static_cast<std::size_t>(rows * kDim));
    core::DeviceBuffer in(memory, ones.size() * sizeof(float));
    in.upload(ones.data());
    const core::DeviceBuffer out(memory, found.size() * sizeof(float));
    ForwardArgs args;
    args.problem.device = {DeviceType::cuda, 0};
    args.problem.q = {in.data(), DType::f32, {1, 1, rows, kDim}};
    args.problem.k = args.problem.v = {in.data(), DType::f32, {1, 1, kKeys, kDim}};
    args.problem.pattern = Pattern::dense();
    args.run.kernel = "general_fp32";
    args.out = {out.data(), DType::f32, {1, 1, rows, kDim}};
    try {
      for (int i = 0; i < kLaunches; ++i) forward(args);
    } catch (const Error& error) {
      ADD_FAILURE() << rows << " rows: " << error.what();
    }
    out.download(found.data());
    EXPECT_TRUE(std::ranges::all_of(found, [](float x) { return x == 1.0f; })) << rows << " rows";
  };
  std::vector<std::jthread> threads;
  for (const std::int64_t rows : {std::int64_t{4}, kRows, std::int64_t{4}, kRows}) threads.emplace_back(work, rows);
}

// fp32: a weight far below that of a later tile's key, but not as far below the reference of its own tile.
TEST(GeneralTable, RaisedReferencesLeaveSmallWeights) {
  if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  constexpr std::int64_t kDim = 4, kKeys = 192;
  constexpr double kLn2 = 0.6931471805599453;
  std::vector<float> q(kDim, 0.0f), k(kKeys * kDim, 0.0f), v(kKeys * kDim, 0.0f), out(kDim);
  q[0] = 1;
  for (std::int64_t j = 0; j < kKeys; ++j) k[static_cast<std::size_t>(j * kDim)] = -2000;
  // Logarithms of weights, base 2, in three tiles; a column of V each.
  const std::vector<float> scores{0, 46, 134};
  for (std::size_t i = 0; i < scores.size(); ++i) {
    k[i * 64 * kDim] = scores[i];
    v[i * 64 * kDim + i] = 1;
  }
  core::DeviceMemory& memory = cuda::memory(0);
  const auto upload = [&](const std::vector<float>& values) {
    core::DeviceBuffer buffer(memory, values.size() * sizeof(float));
    buffer.upload(values.data());
    return buffer;
  };
  const core::DeviceBuffer gpu_q = upload(q), gpu_k = upload(k), gpu_v = upload(v), gpu_out = upload(out);
  for (const Fp32Products products : {Fp32Products::tf32_allowed, Fp32Products::full}) {
    ForwardArgs args;
    args.problem.device = {DeviceType::cuda, 0};
    args.problem.q = {gpu_q.data(), DType::f32, {1, 1, 1, kDim}};
    args.problem.k = {gpu_k.data(), DType::f32, {1, 1, kKeys, kDim}};
    args.problem.v = {gpu_v.data(), DType::f32, {1, 1, kKeys, kDim}};
    args.problem.pattern = Pattern::dense();
    args.problem.scale = kLn2;
    args.problem.fp32_products = products;
    args.run.kernel = "general_fp32";
    args.out = {gpu_out.data(), DType::f32, {1, 1, 1, kDim}};
    forward(args);
    gpu_out.download(out.data());
    EXPECT_NEAR(out[1] * 0x1p88, 1, 0.01);
    EXPECT_NEAR(out[2], 1, 1e-6);
  }
}

// Problems that failed once: heads that choose together among biases of the size of the largest numbers; a soft cap of
// rounded scores, whose log-sum-exp the backward is given; keys that nobody sees in groups that are full.
TEST(GeneralTable, WhatFailedOncePasses) {
  if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  const auto expect = [](std::uint64_t seed, std::int64_t index, const char* kernel, Pass pass, DType dtype,
                         std::optional<Pattern> pattern, std::int64_t max_n) {
    check::CheckOptions options;
    options.device = {DeviceType::cuda, 0};
    options.limits.pass = pass;
    options.limits.dtype = dtype;
    options.limits.pattern = pattern;
    options.limits.max_n = max_n;
    if (max_n > 2000) options.limits.max_work = 60'000'000;
    const check::CaseReport report = check::check_case(seed, index, kernel, options);
    EXPECT_TRUE(report.served && report.passed()) << report.command << "\n" << testing::PrintToString(report.failures);
  };
  expect(7, 171, "general_fp32", Pass::forward, DType::f32, Pattern{2, 4}, 2049);
  expect(51, 529, "general_fp16", Pass::backward, DType::f16, {}, 200);
  expect(45, 91, "general_fp32", Pass::backward, DType::f32, Pattern{1, 4}, 150);
}

TEST(GeneralTable, EveryValidForwardIsServed) {
  if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  for (const std::string& name : expect_all_served(Pass::forward)) {
    EXPECT_EQ(name.find("pipeline"), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace dspattn
