// One random problem of the contract, described by numbers alone: drawn from a seed and a case index, the same on every
// platform. check/case_data.h turns it into tensors.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/kernel_row.h"
#include "dspattn/attention.h"
#include "dspattn/kernels.h"

namespace dspattn::check {

// Narrows what is drawn, for kernels that serve a part of the contract. Unset: everything.
struct DrawLimits {
  std::optional<Pass> pass;
  std::optional<DType> dtype;
  std::optional<Pattern> pattern;
  std::optional<Grouping> grouping;
  std::optional<std::int64_t> head_dim;  // d and d_v
  std::optional<Rest> rest;              // mean: forward only
  std::optional<Choice> choice;          // shared: forward only
  std::int64_t max_n = 300;
  std::optional<std::int64_t> max_queries;  // n_q is one of 1 to so many
  // batch * heads * n_q * n_k * (d + d_v): bounds the time of the fp64 oracle, about 2 ns each.
  std::int64_t max_work = 6'000'000;
};

// How a rank-4 tensor [batch, heads, n, width] lies in memory.
enum class Layout : std::uint8_t { bhnd, bnhd, padded };

// A mask tensor: which dimensions have an extent of 1, and which a full extent with stride 0.
struct Broadcast {
  std::array<bool, 4> one{};
  std::array<bool, 4> zero_stride{};
};

struct Case {
  std::uint64_t seed = 0;
  std::int64_t index = 0;
  Pass pass = Pass::forward;
  DType dtype = DType::f32;
  Pattern pattern;
  Grouping grouping = Grouping::consecutive;
  std::int64_t batch = 1, heads = 1, kv_heads = 1, n_q = 1, n_k = 1, d = 1, d_v = 1;  // n: longest when packed
  bool packed = false;
  std::vector<std::int32_t> cu_q, cu_k;
  std::int64_t tail_q = 0, tail_k = 0;  // rows past the last sequence
  std::int64_t cu_stride = 1;           // of cu_q and cu_k
  bool causal = false;
  Alignment alignment = Alignment::bottom_right;
  std::int64_t offset = 0;  // of the diagonal
  std::optional<std::int64_t> window_left, window_right;
  std::vector<std::int32_t> key_lengths;  // empty: none
  std::int64_t key_lengths_stride = 1;    // 0: one number for all sequences
  std::optional<Broadcast> allowed, bias;
  DType bias_dtype = DType::f32;
  bool lowest_bias = false;   // some biases are the lowest finite number, as models write masks
  bool extreme_bias = false;  // some are of the size of the largest number, of either sign
  std::optional<double> scale;
  bool extreme_scale = false;  // far from 1/sqrt(d); elements of q and k may make up for it
  Fp32Products fp32_products = Fp32Products::full;
  Rest rest = Rest::drop;             // mean: forward only, and mask tensors have one query row
  bool value_sums = false;            // of V are given; with mean alone, and not packed
  bool nan_past_length = false;       // V is NaN at keys that the lengths hide
  Choice choice = Choice::each_head;  // shared: forward only
  Layout q_layout = Layout::bhnd, k_layout = Layout::bhnd, v_layout = Layout::bhnd, out_layout = Layout::bhnd;
  bool want_lse = true;
  bool fp32_results = false;  // outputs, and the gradient given, in fp32 though the inputs are 16-bit
  bool integers = false;      // small integers: every sum is exact, so the selection must be, too
  bool nan_in_k = false;      // one NaN somewhere in k
  bool nan_in_q = false;      // one NaN somewhere in q
  // Of the elements of q, a power of two or 0: scores in the hundreds or ten thousands, or all equal (forward only), or
  // what makes up for an extreme scale, together with the same of k.
  double magnitude = 1;
  double magnitude_k = 1;
  // What kernels serve beyond the plain contract.
  double dropout = 0;  // probability
  std::uint64_t dropout_seed = 0, dropout_offset = 0;
  bool dropout_state = false;  // both are read from the device
  std::optional<double> soft_cap;
  bool sinks = false;
  std::int64_t page = 0;                                // keys of a page; 0: k and v are in one piece
  bool d_lse = false, d_bias = false, d_sinks = false;  // backward: given, wanted, wanted

  // Whether scores and biases are of the sizes that models have.
  bool ordinary() const { return !lowest_bias && !extreme_bias && !extreme_scale && magnitude == 1; }
  // Whether the selection must be the oracle's to the last key: every sum is exact.
  bool exact() const { return choice == Choice::each_head && (integers || (magnitude == 0 && !bias)); }
  // The same without what is not among `served`.
  Case restricted_to(core::Features served) const;
  DType result_dtype() const { return fp32_results ? DType::f32 : dtype; }
  Results results() const { return fp32_results ? Results::fp32 : Results::as_inputs; }
  std::int64_t length_q(std::int64_t sequence) const;
  std::int64_t length_k(std::int64_t sequence) const;
};

Case draw_case(std::uint64_t seed, std::int64_t index, const DrawLimits& limits = {});

// One line for a person, and a number in such a line.
std::string describe(const Case& drawn);
std::string number(double value, int digits = 6);

}  // namespace dspattn::check
