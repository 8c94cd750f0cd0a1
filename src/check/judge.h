// Compares what a kernel wrote with what was expected, element by element, and looks at what it must not have written.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check/case_data.h"
#include "check/check.h"
#include "core/half.h"
#include "cpu/reference.h"

namespace dspattn::check {

// Which rows of an output belong to a sequence, and which to nobody.
enum class Side { queries, keys };

class Judge {
 public:
  Judge(const CaseData& data, CaseReport& report) : data_(data), report_(report) {}

  // A rank-4 output (or the rank-3 LSE as width 1) against expected values, element by element.
  void compare(const char* name, const Tensor& actual, Side side, std::int64_t width,
               const std::vector<double>& expected, const std::vector<double>& allowed) {
    const ConstTensorView view = actual.host_view();
    int failures = 0;
    for (const cpu::Sequence& seq : cpu::sequences_of(data_.host_problem())) {
      const std::int64_t begin = side == Side::queries ? seq.q_begin : seq.k_begin;
      const std::int64_t rows = side == Side::queries ? seq.n_q : seq.n_k;
      for (std::int64_t h = 0; h < view.extent(1); ++h) {
        for (std::int64_t i = begin; i < begin + rows; ++i) {
          for (std::int64_t c = 0; c < width && failures < 3; ++c) {
            const auto at =
                static_cast<std::size_t>(((seq.batch * view.extent(1) + h) * view.extent(2) + i) * width + c);
            const std::string problem = element_problem(actual, expected[at], allowed[at], seq.batch, h, i, c);
            if (problem.empty()) continue;
            ++failures;
            report_.failures.push_back(std::string(name) + "[" + std::to_string(seq.batch) + ", " + std::to_string(h) +
                                       ", " + std::to_string(i) + ", " + std::to_string(c) + "]: " + problem);
          }
        }
      }
    }
    check_surroundings(name, actual, side, width);
  }

  // The gradient of a bias or of sinks, which has no rows of queries or keys.
  void compare_all(const char* name, const Tensor& actual, const std::vector<double>& expected,
                   const std::vector<double>& allowed) {
    const ConstTensorView view = actual.host_view();
    const auto extent = [&](int dim) { return dim < view.rank ? view.extent(dim) : std::int64_t{1}; };
    int failures = 0;
    for (std::size_t at = 0; at < expected.size() && failures < 3; ++at) {
      auto left = static_cast<std::int64_t>(at);
      std::int64_t index[4] = {};
      for (int dim = 3; dim >= 0; --dim) {
        index[dim] = left % extent(dim);
        left /= extent(dim);
      }
      const std::string problem =
          element_problem(actual, expected[at], allowed[at], index[0], index[1], index[2], index[3]);
      if (problem.empty()) continue;
      ++failures;
      report_.failures.push_back(std::string(name) + "[" + std::to_string(index[0]) + ", " + std::to_string(index[1]) +
                                 ", " + std::to_string(index[2]) + ", " + std::to_string(index[3]) + "]: " + problem);
    }
    check_outside(name, actual);
  }

  void same_bits(const char* name, const Tensor& first, const Tensor& again, const std::string& how) {
    if (first.present() && first.bytes() != again.bytes()) {
      report_.failures.push_back(std::string(name) + ": " + how + " gives other bits");
    }
  }

 private:
  std::string element_problem(const Tensor& actual, double expected, double allowed, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t c) {
    if (actual.is_poisoned(b, h, i, c)) return "not written";
    const double value = actual.at(b, h, i, c);
    if (std::isnan(expected)) return std::isnan(value) ? "" : "expected NaN, got " + number(value);
    if (std::isinf(expected)) return value == expected ? "" : "expected " + number(expected) + ", got " + number(value);
    // GPU kernels may give infinity where fp32 ends, and those of 16-bit inputs where only the sign counts: they take
    // scores below fp16's range for masked (docs/fused_kernel.md).
    const bool on_gpu = data_.device_problem().device.type == DeviceType::cuda;
    const bool fp32_ends = std::abs(expected) == core::largest_of(DType::f32);
    const bool fp16_ends = data_.drawn().dtype != DType::f32 && std::abs(expected) > core::largest_of(DType::f16) &&
                           allowed >= std::abs(expected);
    // What a 16-bit tensor cannot hold is infinite there.
    const DType type = actual.host_view().dtype;
    const bool type_ends = type != DType::f32 &&
                           std::isinf(core::round_to(type, std::abs(expected) + std::min(allowed, std::abs(expected))));
    if ((type_ends || (on_gpu && (fp32_ends || fp16_ends))) && std::isinf(value) &&
        std::signbit(value) == std::signbit(expected)) {
      return "";
    }
    const double error = std::abs(value - expected);
    if (!(error <= allowed)) {
      return "expected " + number(expected) + ", got " + number(value) + "; error " + number(error) + ", allowed " +
             number(allowed);
    }
    // A tolerance of 1e30 and more is that of an LSE far out of reach: no measure of precision.
    if (allowed > 0 && allowed < 1e30) report_.worst = std::max(report_.worst, error / allowed);
    return "";
  }

  void check_outside(const char* name, const Tensor& actual) {
    if (!actual.surroundings_intact()) {
      report_.failures.push_back(std::string(name) + ": memory around the tensor or between its rows was written");
    }
  }

  void check_surroundings(const char* name, const Tensor& actual, Side side, std::int64_t width) {
    check_outside(name, actual);
    if (!data_.drawn().packed) return;
    // Rows past the last sequence see no key.
    const ConstTensorView view = actual.host_view();
    const double expected = view.rank == 3 ? -std::numeric_limits<double>::infinity() : 0.0;
    const std::int64_t end = side == Side::queries ? data_.drawn().cu_q.back() : data_.drawn().cu_k.back();
    for (std::int64_t h = 0; h < view.extent(1); ++h) {
      for (std::int64_t i = end; i < view.extent(2); ++i) {
        for (std::int64_t c = 0; c < width; ++c) {
          const std::string problem = element_problem(actual, expected, 0.0, 0, h, i, c);
          if (problem.empty()) continue;
          report_.failures.push_back(std::string(name) + ": row " + std::to_string(i) + " of no sequence: " + problem);
          return;
        }
      }
    }
  }

  const CaseData& data_;
  CaseReport& report_;
};

}  // namespace dspattn::check
