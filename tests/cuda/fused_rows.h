// A row of the fused kernel's table and what its tests at the limits share. Skipped without a Hopper GPU.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "api/device_memory.h"
#include "check/check.h"
#include "cuda/random_problems.h"

namespace dspattn {

inline constexpr Device kGpu{DeviceType::cuda, 0};

inline core::DeviceMemory& gpu_memory() { return api::memory_of(kGpu); }

// A row of the table by its name: sm90_fused_2_4_bf16_d64, decode_fp32_d128, general_bf16.
struct Row {
  std::string name;
  DType dtype = DType::bf16;
  Pattern pattern{2, 4};
  std::int64_t dim = 0;

  explicit Row(const std::string& row_name) : name(row_name) {
    const auto has = [&](const char* part) { return row_name.find(part) != std::string::npos; };
    dim = 64;  // of rows that serve many: one of them
    if (has("pipeline")) return;
    dtype = has("_fp32") ? DType::f32 : has("_bf16") ? DType::bf16 : DType::f16;
    if (has("_1_2_")) pattern = {1, 2};
    if (has("_d")) dim = std::stoi(row_name.substr(row_name.rfind('d') + 1));
  }
  check::Case problem(std::int64_t heads, std::int64_t n_q, std::int64_t n_k) const {
    check::Case drawn;
    drawn.seed = 5;
    drawn.dtype = dtype;
    drawn.pattern = pattern;
    drawn.grouping = Grouping::interleaved;
    drawn.heads = drawn.kv_heads = heads;
    drawn.n_q = n_q;
    drawn.n_k = n_k;
    drawn.d = drawn.d_v = dim;
    return drawn;
  }
};

class Robust : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string why = no_hopper(); !why.empty()) GTEST_SKIP() << why;
  }
  Row row() const { return Row(GetParam()); }

  // The three-part comparison, with aligned tensors (the fast variants) and with tensors off any alignment (the general
  // one) unless these are not asked for, in both groupings.
  void expect_right(check::Case drawn, bool also_unaligned = true) const {
    const check::Runner runner = check::library_runner(gpu_memory(), GetParam(), {});
    check::CheckOptions options;
    options.device = kGpu;
    for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
      for (const check::Layout layout : {check::Layout::bhnd, check::Layout::padded}) {
        if (layout == check::Layout::padded && !also_unaligned) continue;
        drawn.grouping = grouping;
        drawn.q_layout = drawn.k_layout = drawn.v_layout = drawn.out_layout = layout;
        const check::CaseReport report = check::check_drawn(drawn, runner, options);
        for (const std::string& failure : report.failures) ADD_FAILURE() << report.description << "\n" << failure;
      }
    }
  }
};

class RobustRow : public Robust {};    // every row
class RobustBusy : public Robust {};   // every row, all of the GPU
class RobustLarge : public Robust {};  // two rows

}  // namespace dspattn
