// Random problems for the tests of the fast CPU rows, with everything they point to, and how they are run.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/half.h"
#include "dspattn/kernels.h"

namespace dspattn::test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();

struct Numbers {
  std::uint64_t state = 1;
  std::uint64_t bits() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return state >> 33;
  }
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(bound));
  }
  double real() { return static_cast<double>(bits()) / 1073741824.0 - 1.0; }
  bool chance(int percent) { return below(100) < percent; }
};

// Elements of one tensor, with or without gaps between rows, as [batch, heads, n, width] or [batch, n, heads, width].
struct Tensor {
  std::vector<std::uint8_t> memory;
  TensorView view;

  Tensor(DType dtype, std::int64_t batch, std::int64_t heads, std::int64_t n, std::int64_t width, bool heads_inside,
         std::int64_t gap) {
    view = TensorView(nullptr, dtype, {batch, heads, n, width});
    const std::int64_t row = width + gap;
    view.stride = heads_inside ? std::array<std::int64_t, 4>{n * heads * row, row, heads * row, 1}
                               : std::array<std::int64_t, 4>{heads * n * row, n * row, row, 1};
    // Poison shows reads and writes outside the rows; one spare element keeps empty tensors from being null.
    memory.assign(static_cast<std::size_t>(batch * heads * n * row + 1) * size_bytes(dtype), 0xff);
    view.data = memory.data();
  }
  template <typename Value>
  void fill(Value value) {
    for_each([&](std::int64_t offset) { core::store_element(view.data, view.dtype, offset, value()); });
  }
  std::vector<double> values() const {
    std::vector<double> list(
        static_cast<std::size_t>(view.extent(0) * view.extent(1) * view.extent(2) * view.extent(3)));
    double* to = list.data();
    for_each([&](std::int64_t offset) { *to++ = core::load_element(view.data, view.dtype, offset); });
    return list;
  }
  // Tests are compiled without optimisation: no calls within the innermost loop but the visit.
  template <typename Visit>
  void for_each(Visit visit) const {
    const std::int64_t width = view.extent(3);
    for (std::int64_t b = 0; b < view.extent(0); ++b) {
      for (std::int64_t h = 0; h < view.extent(1); ++h) {
        for (std::int64_t i = 0; i < view.extent(2); ++i) {
          const std::int64_t row = b * view.step(0) + h * view.step(1) + i * view.step(2);
          for (std::int64_t x = 0; x < width; ++x) visit(row + x);
        }
      }
    }
  }
};

// A problem with everything it points to.
struct Case {
  std::int64_t batch = 1, heads = 1, kv_heads = 1, n_q = 1, n_k = 1, d = 1, d_v = 1;
  DType dtype = DType::f32;
  std::vector<Tensor> tensors;
  std::vector<std::int32_t> cu_q, cu_k, key_lengths;
  std::vector<std::uint8_t> allowed, bias;
  Problem problem;
  std::string text;

  std::int64_t rows_q() const { return cu_q.empty() ? n_q : cu_q.back(); }
  std::int64_t rows_k() const { return cu_k.empty() ? n_k : cu_k.back(); }
  std::int64_t outer() const { return cu_q.empty() ? batch : 1; }
  Tensor like_q(std::int64_t width) const { return Tensor(dtype, outer(), heads, rows_q(), width, false, 3); }
  Tensor like_k(std::int64_t width) const { return Tensor(dtype, outer(), kv_heads, rows_k(), width, true, 0); }

  // Fills q, k, v once the sizes are set.
  void make(Numbers& numbers, bool integers) {
    const bool inside = numbers.chance(50);
    const std::int64_t gap = numbers.chance(50) ? numbers.below(5) : 0;
    tensors.emplace_back(dtype, outer(), heads, rows_q(), d, inside, gap);
    tensors.emplace_back(dtype, outer(), kv_heads, rows_k(), d, inside, gap);
    tensors.emplace_back(dtype, outer(), kv_heads, rows_k(), d_v, !inside, gap);
    const auto score_part = [&] { return integers ? static_cast<double>(numbers.below(7) - 3) : numbers.real(); };
    tensors[0].fill(score_part);
    tensors[1].fill(score_part);
    tensors[2].fill([&] { return numbers.real(); });
    problem.q = tensors[0].view;
    problem.k = tensors[1].view;
    problem.v = tensors[2].view;
    // A power of two, so that bias / scale is exact, near 1 / (sqrt(d) * size of an element).
    if (integers) problem.scale = std::exp2(-std::round(std::log2(4.0 * std::sqrt(static_cast<double>(d)))));
    text = "batch " + std::to_string(batch) + " heads " + std::to_string(heads) + "/" + std::to_string(kv_heads) +
           " n " + std::to_string(n_q) + "x" + std::to_string(n_k) + " d " + std::to_string(d) + "," +
           std::to_string(d_v) + " " + std::string(name(dtype)) + " " + to_string(problem.pattern) + " " +
           to_string(problem.grouping) + (cu_q.empty() ? "" : " packed") + (problem.mask.causal ? " causal" : "") +
           (problem.mask.window_left ? " left" : "") + (problem.mask.window_right ? " right" : "") +
           (key_lengths.empty() ? "" : " lengths") + (allowed.empty() ? "" : " allowed") +
           (bias.empty() ? "" : " bias");
  }
};

inline std::vector<std::int32_t> cumulative(Numbers& numbers, std::int64_t sequences, std::int64_t longest) {
  std::vector<std::int32_t> list{0};
  for (std::int64_t s = 0; s < sequences; ++s) {
    list.push_back(list.back() + static_cast<std::int32_t>(s == 0 ? longest : numbers.below(longest + 1)));
  }
  return list;
}

inline Case random_case(std::uint64_t seed) {
  Numbers numbers{seed * 7919 + 1};
  Case c;
  for (int warm = 0; warm < 8; ++warm) numbers.bits();
  constexpr DType kTypes[] = {DType::f32, DType::f32, DType::bf16, DType::f16};
  c.dtype = kTypes[numbers.below(4)];
  c.batch = numbers.below(3);
  c.kv_heads = 1 + numbers.below(2);
  c.heads = c.kv_heads * (1 + numbers.below(3));
  c.n_q = numbers.chance(10) ? numbers.below(3) : numbers.below(150);
  c.n_k = numbers.chance(10) ? numbers.below(3) : numbers.below(300);
  c.d = numbers.chance(50) ? 16 * (1 + numbers.below(8)) : 1 + numbers.below(256);
  c.d_v = numbers.chance(50) ? c.d : 1 + numbers.below(256);
  c.problem.grouping = numbers.chance(50) ? Grouping::consecutive : Grouping::interleaved;
  switch (numbers.below(5)) {
    case 0:
      c.problem.pattern = {1, 2};
      break;
    case 1:
      c.problem.pattern = Pattern::dense();
      break;
    case 2: {
      const int group = c.problem.grouping == Grouping::interleaved ? 1 << numbers.below(6)
                                                                    : static_cast<int>(1 + numbers.below(kMaxGroup));
      c.problem.pattern = {static_cast<int>(1 + numbers.below(group)), group};
      break;
    }
    default:
      c.problem.pattern = {2, 4};
  }
  if (numbers.chance(25) && c.batch > 0) {
    c.cu_q = cumulative(numbers, c.batch, c.n_q);
    c.cu_k = cumulative(numbers, c.batch, c.n_k);
    const std::int64_t entries = c.batch + 1;
    c.problem.packed =
        Packed{{c.cu_q.data(), DType::i32, {entries}}, {c.cu_k.data(), DType::i32, {entries}}, c.n_q, c.n_k};
  }
  Mask& mask = c.problem.mask;
  mask.causal = numbers.chance(35);
  if (numbers.chance(30)) mask.alignment = Alignment::top_left;
  if (numbers.chance(20)) mask.window_left = numbers.below(200);
  if (numbers.chance(15)) mask.window_right = numbers.below(40);
  if (numbers.chance(25) && c.cu_q.empty()) {
    for (std::int64_t b = 0; b < c.batch; ++b)
      c.key_lengths.push_back(static_cast<std::int32_t>(numbers.below(c.n_k + 1)));
    mask.key_lengths = {c.key_lengths.data(), DType::i32, {c.batch}};
  }
  const auto broadcast = [&](std::int64_t extent) { return numbers.chance(40) ? std::int64_t{1} : extent; };
  if (numbers.chance(25)) {
    mask.allowed = {nullptr, DType::b8, {broadcast(c.batch), broadcast(c.heads), broadcast(c.n_q), broadcast(c.n_k)}};
    c.allowed.resize(static_cast<std::size_t>(mask.allowed.elements()) + 1);
    for (auto& byte : c.allowed) byte = numbers.chance(70) ? 1 : 0;
    mask.allowed.data = c.allowed.data();
  }
  if (numbers.chance(25)) {
    const DType type = numbers.chance(50) ? DType::f32 : c.dtype;
    mask.bias = {nullptr, type, {broadcast(c.batch), broadcast(c.heads), broadcast(c.n_q), broadcast(c.n_k)}};
    c.bias.resize(static_cast<std::size_t>(mask.bias.elements() + 1) * size_bytes(type));
    mask.bias.data = c.bias.data();
    for (std::int64_t i = 0; i < mask.bias.elements(); ++i) {
      const double value = numbers.chance(20) ? -kInf : 0.25 * static_cast<double>(numbers.below(9) - 4);
      core::store_element(c.bias.data(), type, i, value);
    }
  }
  c.make(numbers, true);
  return c;
}

struct Forward {
  Tensor out;
  Tensor lse;
};

inline Forward run_forward(const Case& c, const std::string& kernel, int threads) {
  Forward result{c.like_q(c.d_v), Tensor(DType::f32, c.outer(), c.heads, c.rows_q(), 1, false, 0)};
  ForwardArgs args;
  args.problem = c.problem;
  args.out = result.out.view;
  args.lse = TensorView(result.lse.view.data, DType::f32, {c.outer(), c.heads, c.rows_q()});
  args.run.kernel = kernel;
  args.run.threads = threads;
  forward(args);
  return result;
}

struct Backward {
  Tensor d_q, d_k, d_v;
};

inline Backward run_backward(const Case& c, const Forward& done, const Tensor& d_out, const std::string& kernel,
                             int threads) {
  Backward result{c.like_q(c.d), c.like_k(c.d), c.like_k(c.d_v)};
  BackwardArgs args;
  args.problem = c.problem;
  args.out = done.out.view;
  args.lse = ConstTensorView(done.lse.view.data, DType::f32, {c.outer(), c.heads, c.rows_q()});
  args.d_out = d_out.view;
  args.d_q = result.d_q.view;
  args.d_k = result.d_k.view;
  args.d_v = result.d_v.view;
  args.run.kernel = kernel;
  args.run.threads = threads;
  backward(args);
  return result;
}

inline Tensor random_d_out(const Case& c) {
  Numbers numbers{99};
  Tensor d_out = c.like_q(c.d_v);
  d_out.fill([&] { return numbers.real(); });
  return d_out;
}

}  // namespace dspattn::test
