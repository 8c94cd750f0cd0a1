// How far the scores, weights and results of one query row may be off: by bounds (fp32), or as the plain computation in
// a 16-bit type is.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check/rounding.h"
#include "check/row_walk.h"
#include "core/half.h"

namespace dspattn::check {

inline constexpr double kTiny = 1e-37;  // results may flush below fp32's normal numbers
inline constexpr double kLeastWeight =
    0x1p-126;                                // an exponential below fp32's normal numbers may come out as any of them
inline constexpr double kNothing = 1e-30;    // beside results of 16-bit inputs, where all that is exact is 0
inline constexpr double kFp16Reach = 60000;  // a 16-bit kernel may hold scores in fp16, clamped to its largest number

inline double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(a[i]) && std::isfinite(b[i])) largest = std::max(largest, std::abs(a[i] - b[i]));
  }
  return largest;
}

inline double largest_magnitude(const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

// Twice the plain computation's error, as it came out or as it is expected: over the few elements of a small problem
// its roundings can cancel by chance. `variance` is that of one element's error, the largest of all elements.
inline std::vector<double> twice_plain(const std::vector<double>& plain, const std::vector<double>& exact, DType dtype,
                                       double variance) {
  const double error = std::max(largest_difference(plain, exact), 2 * std::sqrt(variance));
  return std::vector<double>(exact.size(), 2 * error + core::epsilon_of(dtype) * largest_magnitude(exact) + kNothing);
}

// Variance of a rounding error relative to the number rounded: uniform over half a unit in the last place.
inline double rounding_variance(DType dtype) { return core::epsilon_of(dtype) * core::epsilon_of(dtype) / 12; }

// Errors of a row's scores: of the products, the scale, the bias, and the base-2 form that exponentials take.
struct ScoreErrors {
  std::vector<double> each;  // of the kept keys; a weight errs by as much, relative to itself
  double mean = 0;           // weighted: the relative error of the sum that weights are divided by

  ScoreErrors(const RowContext& context, const Walk& walk, double unit) {
    for (const auto& key : context.kept) {
      const double magnitude = walk.swallowed(key.score) ? 0.0 : key.magnitude;
      each.push_back((sum_error(walk.d, unit) + 4 * kUnitF32) * magnitude + 4 * kUnitF32);
      if (walk.cap > 0) each.back() += 8 * kUnitF32 * std::min(walk.cap, magnitude);  // tanh
      mean += key.weight * each.back();
    }
    if (context.sink_weight > 0) mean += context.sink_weight * 4 * kUnitF32 * (1 + std::abs(context.sink));
  }
};

// Whether rounding of the scores decides the weights: they are then any, and a result is any mean of the kept values.
inline bool weights_are_open(const RowContext& context, const Walk& walk, const ScoreErrors& errors) {
  double largest = -std::numeric_limits<double>::infinity(), error = 0;
  for (std::size_t j = 0; j < context.kept.size(); ++j) {
    if (context.kept[j].score <= largest) continue;
    largest = context.kept[j].score;
    error = errors.each[j];
  }
  if (context.kept.empty()) return false;  // a sink alone
  const bool clamped = walk.clamps && std::abs(largest) > kFp16Reach;
  return clamped || (error > 0.5 && !walk.swallowed(largest));
}

// The same of a kernel of 16-bit inputs that takes exponentials of scores in fp16, whose rounding is 2^-12 of a score:
// among biases as large as that a gradient's weights are any, and so is what they make of dP.
inline bool fp16_scores_decide(const RowContext& context, const Walk& walk) {
  double largest = -std::numeric_limits<double>::infinity();
  for (const auto& key : context.kept) largest = std::max(largest, key.score);
  return walk.clamps && std::isfinite(largest) && 0x1p-12 * std::abs(largest) > 0.5;
}

// The plain computation of one row in a 16-bit type: scores and weights, and the mean of V that pruned keys bring, each
// rounded where an unfused one stores them.
struct PlainRow {
  std::vector<double> weights;
  std::vector<double> dropped;  // the same after dropout
  std::vector<double> out;
  double lse = 0;

  PlainRow(const RowContext& context, const Walk& walk, DType dtype) {
    const auto round = [&](double value) { return core::round_to(dtype, value); };
    std::vector<double> scores;
    double largest = context.sink;
    for (const auto& key : context.kept) {
      double dot = 0;
      for (std::int64_t c = 0; c < walk.d; ++c) dot += context.q[c] * key.k[c];
      const double bias = key.score - walk.capped(walk.scale * dot);
      // Where the product overflows the type, an implementation that scales its inputs first.
      double product = round(std::isfinite(round(dot)) ? walk.scale * round(dot) : walk.scale * dot);
      if (walk.cap > 0) product = round(walk.capped(product));
      scores.push_back(round(product + bias));
      largest = std::max(largest, scores.back());
    }
    if (!std::isfinite(largest)) {  // lowest biases that the type cannot hold: only the precise scores make sense
      for (std::size_t j = 0; j < scores.size(); ++j) scores[j] = context.kept[j].score;
      largest = std::max(context.sink, *std::max_element(scores.begin(), scores.end()));
    }
    double sum = std::exp(context.sink - largest);
    for (const double score : scores) sum += std::exp(score - largest);
    lse = largest + std::log(sum);
    out.assign(static_cast<std::size_t>(walk.d_v), 0.0);
    for (std::size_t j = 0; j < scores.size(); ++j) {
      weights.push_back(round(std::exp(scores[j] - largest) / sum));
      const auto& key = context.kept[j];
      dropped.push_back(round(weights.back() * key.factor));
      for (std::int64_t c = 0; c < walk.d_v; ++c) {
        out[static_cast<std::size_t>(c)] += dropped.back() * (key.pruned ? round(key.v[c]) : key.v[c]);
      }
    }
    for (double& value : out) value = round(value);
  }
};

}  // namespace dspattn::check
