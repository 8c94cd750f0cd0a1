// A row of the fused kernel's table and what its tests at the limits share. Skipped without a Hopper GPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "api/device_memory.h"
#include "check/case_data.h"
#include "check/check.h"
#include "cuda/device/facts.h"
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

// In which groupings and layouts a problem is run: tensors aligned (the fast variants) and off any alignment (the
// general one) unless these are not asked for, in both groupings.
//   DSPATTN_FORMS   2: not all four combinations, but each grouping and each layout once (the emulated GPU takes long)
struct Form {
  Grouping grouping;
  check::Layout layout;
};
inline std::vector<Form> forms(bool also_unaligned = true) {
  using enum Grouping;
  using enum check::Layout;
  if (!also_unaligned) return {{interleaved, bhnd}, {consecutive, bhnd}};
  if (from_environment("DSPATTN_FORMS", 4) == 2) return {{interleaved, bhnd}, {consecutive, padded}};
  return {{interleaved, bhnd}, {interleaved, padded}, {consecutive, bhnd}, {consecutive, padded}};
}

inline void set_form(check::Case& drawn, const Form& form) {
  drawn.grouping = form.grouping;
  drawn.q_layout = drawn.k_layout = drawn.v_layout = drawn.out_layout = form.layout;
}

class Robust : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string why = no_hopper(); !why.empty()) GTEST_SKIP() << why;
  }
  Row row() const { return Row(GetParam()); }

  // The three-part comparison, in all forms.
  void expect_right(check::Case drawn, bool also_unaligned = true) const {
    const check::Runner runner = check::library_runner(gpu_memory(), GetParam(), {});
    check::CheckOptions options;
    options.device = kGpu;
    for (const Form& form : forms(also_unaligned)) {
      set_form(drawn, form);
      const check::CaseReport report = check::check_drawn(drawn, runner, options);
      for (const std::string& failure : report.failures) ADD_FAILURE() << report.description << "\n" << failure;
    }
  }

  // Heads that are more items than there are CTAs have the bits that they have a few at a time, one item a CTA: who
  // takes an item, and what it did before, shows in nothing. The oracle would take minutes for so many; two of them are
  // judged by it, as a problem of their own.
  void expect_as_few_at_a_time(check::Case drawn, bool also_unaligned = true) const {
    for (const Form& form : forms(also_unaligned)) {
      set_form(drawn, form);
      const check::CaseData data(drawn, kGpu, gpu_memory());
      const check::Tensor out = forward_by(data, drawn.heads);
      const check::Tensor few = forward_by(data, std::max(1, cuda::device_facts(0).multiprocessors / 4));
      EXPECT_TRUE(out.bytes() == few.bytes()) << check::describe(drawn);
    }
    drawn.heads = drawn.kv_heads = 2;
    expect_right(drawn, also_unaligned);
  }

 private:
  // The output of a problem whose heads are given `count` at a time.
  check::Tensor forward_by(const check::CaseData& data, std::int64_t count) const {
    const check::Case& drawn = data.drawn();
    check::Tensor out = data.output_like_q(drawn.d_v);
    const check::Runner runner = check::library_runner(gpu_memory(), GetParam(), {});
    for (std::int64_t first = 0; first < drawn.heads; first += count) {
      const auto heads_of = [&](auto view) {
        const std::int64_t bytes = first * view.step(1) * static_cast<std::int64_t>(size_bytes(view.dtype));
        view.data = reinterpret_cast<decltype(view.data)>(reinterpret_cast<std::uintptr_t>(view.data) +
                                                          static_cast<std::uintptr_t>(bytes));
        view.shape[1] = std::min(count, drawn.heads - first);
        return view;
      };
      ForwardArgs args;
      args.problem = data.device_problem();
      args.problem.q = heads_of(args.problem.q);
      args.problem.k = heads_of(args.problem.k);
      args.problem.v = heads_of(args.problem.v);
      args.out = heads_of(out.device_view());
      runner.forward(args);
    }
    out.download();
    for (std::int64_t head = 0; head < drawn.heads; ++head) EXPECT_FALSE(out.is_poisoned(0, head, drawn.n_q - 1));
    return out;
  }
};

class RobustRow : public Robust {};    // every row
class RobustBusy : public Robust {};   // every row, all of the GPU
class RobustLarge : public Robust {};  // two rows

}  // namespace dspattn
