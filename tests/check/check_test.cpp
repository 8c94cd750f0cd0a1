// The checks pass every CPU kernel, and what the contract allows others.
#include "check/check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "check/problems.h"
#include "core/device_memory.h"
#include "core/geometry.h"
#include "core/half.h"
#include "cpu/reference.h"
#include "dspattn/kernels.h"

namespace dspattn::check {
namespace {

// AddressSanitizer looks at accesses, not at figures: a fifth of the problems, of all kinds, is enough for it.
#ifdef DSPATTN_SANITIZED
constexpr std::int64_t kEvery = 5;
#else
constexpr std::int64_t kEvery = 1;
#endif

TEST(Check, EveryCpuKernelPassesRandomProblems) {
  std::vector<std::string> names;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const KernelInfo& info : kernels(pass)) {
      if (info.device == DeviceType::cpu && (names.empty() || names.back() != info.name)) names.emplace_back(info.name);
    }
  }
  CheckOptions options;
  options.limits = small_problems();
  for (const std::string& name : names) {
    int served = 0;
    for (std::int64_t index = 0; index < 250; index += kEvery) {
      const CaseReport report = check_case(2024, index, name, options);
      served += report.served;
      EXPECT_TRUE(report.passed()) << text_of(report);
    }
    EXPECT_GT(served, 0) << name;
  }
}

// Few cases hold a NaN, and it shows most where rows see few keys.
TEST(Check, NaNStaysInItsRows) {
  CheckOptions options;
  options.limits.max_work = 20'000;
  const Runner runner = library_runner(core::host_memory(), "", "");
  int checked = 0;
  for (std::int64_t index = 0; checked < 150; ++index) {
    const Case drawn = draw_case(77, index, options.limits);
    if (!drawn.nan_in_k && !drawn.nan_in_q) continue;
    ++checked;
    const CaseReport report = check_drawn(drawn, runner, options);
    EXPECT_TRUE(report.passed()) << text_of(report);
  }
}

// Gradients beyond fp16's largest number are infinite in an fp16 tensor, and nothing else.
TEST(Check, WhatTheTypeCannotHoldIsInfinite) {
  CheckOptions options;
  options.limits.pass = Pass::backward;
  options.limits.dtype = DType::f16;
  options.limits.max_n = 60;
  const Case drawn = draw_case(77, 7, options.limits);
  Runner runner = library_runner(core::host_memory(), {}, {});
  EXPECT_TRUE(check_drawn(drawn, runner, options).passed());
  runner.backward = [right = runner.backward](const BackwardArgs& args) {
    right(args);
    auto* bits = static_cast<std::uint16_t*>(args.d_k.data);
    int infinite = 0;
    for (std::int64_t b = 0; b < args.d_k.extent(0); ++b) {
      for (std::int64_t i = 0; i < args.d_k.extent(2) * args.d_k.extent(3); ++i) {
        std::uint16_t& x =
            bits[b * args.d_k.step(0) + i / args.d_k.extent(3) * args.d_k.step(2) + i % args.d_k.extent(3)];
        infinite += (x & 0x7FFF) == 0x7C00 ? 1 : 0;
        if ((x & 0x7FFF) == 0x7C00) --x;  // the largest number
      }
    }
    EXPECT_GT(infinite, 0);
  };
  EXPECT_FALSE(check_drawn(drawn, runner, options).passed());
}

TEST(Check, AnUnknownKernelIsAnError) { EXPECT_THROW(check_case(1, 0, "no_such_kernel"), Error); }

TEST(Check, TheCommandRepeatsTheCase) {
  CheckOptions options;
  options.limits.dtype = DType::bf16;
  options.limits.pattern = Pattern{2, 4};
  EXPECT_EQ(command_line(7, 12, "cpu_reference", options),
            "dspattn verify --seed 7 --case 12 --kernel cpu_reference --dtype bf16 --pattern 2:4");
}

// What the contract allows a 16-bit kernel: exponentials of the scores in fp16 that are compared, weights in the
// inputs' type, a sum of unrounded weights.
void forward_with_fp16_scores(const ForwardArgs& args) {
  const cpu::Reference oracle = cpu::reference_forward(args.problem);
  const DType dtype = args.problem.q.dtype;
  const core::Geometry geometry = core::geometry_of(args.problem);
  const double to_scores = geometry.scale / core::selection_scale(geometry.scale);
  const std::int64_t heads = args.out.extent(1), d_v = args.out.extent(3);
  cpu::reference_forward_kernel(args);  // rows of no sequence
  for (const cpu::Sequence& seq : cpu::sequences_of(args.problem)) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = seq.q_begin; i < seq.q_begin + seq.n_q; ++i) {
        const std::int64_t row = (seq.batch * heads + h) * args.out.extent(2) + i;
        const std::int64_t kv_head = h / (heads / args.problem.v.extent(1));
        double lse = oracle.lse[static_cast<std::size_t>(row)], sum = 0, largest = -1e300;
        std::vector<double> out(static_cast<std::size_t>(d_v), std::isnan(lse) ? lse : 0.0);
        const bool mean = args.problem.rest == Rest::mean;
        double rest = 0;
        for (std::int64_t j = 0; j < seq.n_k && std::isfinite(lse); ++j) {
          if (oracle.selection.at(row, j) || mean) largest = std::max(largest, oracle.keys.at(row, j));
        }
        for (std::int64_t j = 0; j < seq.n_k && std::isfinite(lse); ++j) {
          if (!oracle.selection.at(row, j) && !mean) continue;
          const double weight = std::exp((oracle.keys.at(row, j) - largest) * to_scores);
          sum += weight;
          if (!oracle.selection.at(row, j)) rest += core::round_to(DType::f16, weight);
          if (!oracle.selection.at(row, j)) continue;
          const ConstTensorView& v = args.problem.v;
          const std::int64_t at = seq.batch * v.step(0) + kv_head * v.step(1) + (seq.k_begin + j) * v.step(2);
          const double rounded = core::round_to(dtype, weight);
          for (std::int64_t c = 0; c < d_v; ++c) {
            out[static_cast<std::size_t>(c)] += rounded * core::load_element(v.data, v.dtype, at + c);
          }
        }
        if (sum > 0) lse = largest * to_scores + std::log(sum);
        for (std::int64_t c = 0; c < d_v; ++c) {
          const std::int64_t at = seq.batch * args.out.step(0) + h * args.out.step(1) + i * args.out.step(2) + c;
          if (rest > 0)
            out[static_cast<std::size_t>(c)] += rest * oracle.means[static_cast<std::size_t>(row * d_v + c)];
          core::store_element(args.out.data, args.out.dtype, at,
                              out[static_cast<std::size_t>(c)] / (sum > 0 ? sum : 1));
        }
        if (!args.lse.present()) continue;
        core::store_element(args.lse.data, DType::f32,
                            seq.batch * args.lse.step(0) + h * args.lse.step(1) + i * args.lse.step(2), lse);
      }
    }
  }
}

TEST(Check, AllowsExponentialsOfFp16Scores) {
  CheckOptions options;
  options.limits = small_problems();
  options.limits.pass = Pass::forward;
  options.limits.rest = Rest::drop;
  options.limits.choice = Choice::each_head;
  Runner runner;
  runner.forward = forward_with_fp16_scores;
  for (std::int64_t index = 0; index < 400; index += kEvery) {
    options.limits.dtype = index % 2 == 0 ? DType::f16 : DType::bf16;
    options.limits.pattern = index % 4 < 2 ? Pattern{2, 4} : Pattern{1, 2};
    const CaseReport report = check_drawn(draw_case(41, index, options.limits).restricted_to({}), runner, options);
    EXPECT_TRUE(report.passed()) << text_of(report);
  }
}

}  // namespace
}  // namespace dspattn::check
