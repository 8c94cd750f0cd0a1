#include "check/tolerance.h"

#include <algorithm>
#include <cmath>

#include "check/rounding.h"
#include "check/row_errors.h"
#include "check/row_walk.h"

namespace dspattn::check {

ForwardTolerance forward_tolerance(const CaseData& data, const cpu::Reference& given) {
  const Walk walk(data, given);
  const DType dtype = data.drawn().dtype;
  const double unit = product_unit(data.device_problem());
  ForwardTolerance tolerance{std::vector<double>(given.out.size(), 0.0), std::vector<double>(given.lse.size(), 0.0)};
  std::vector<double> plain_out = given.out, plain_lse = given.lse;
  std::vector<double> by_scores(given.out.size(), 0.0);  // standard deviation of a result, from its scores' rounding
  std::vector<double> spread(given.out.size(), 0.0);     // of results whose weights are open
  // CPU kernels hold a bias of any size precisely where the inputs are fp32.
  const bool precise_biases = dtype == DType::f32 && data.device_problem().device.type == DeviceType::cpu;
  double largest_score = 0, variance = 0;
  walk.each_row([&](const RowContext& context) {
    const auto row = static_cast<std::size_t>(context.row);
    const auto kept = static_cast<std::int64_t>(context.kept.size());
    const ScoreErrors errors(context, walk, unit);
    const bool open = weights_are_open(context, walk, errors);
    tolerance.lse[row] = errors.mean + sum_error(kept) + 8 * kUnitF32 * (1 + std::abs(given.lse[row]));
    if (open) {
      for (std::int64_t c = 0; c < walk.d_v; ++c) {
        double most = 0;
        for (const auto& key : context.kept) most = std::max(most, key.factor * std::abs(key.v[c]));
        spread[row * static_cast<std::size_t>(walk.d_v) + static_cast<std::size_t>(c)] = 2.01 * most + kTiny;
      }
    }
    // Of an LSE that a kernel may have clamped only the sign counts: it is out of any sum's reach.
    if (open || (walk.swallowed(given.lse[row]) && !precise_biases)) {
      tolerance.lse[row] = std::max(tolerance.lse[row], std::abs(given.lse[row]));
    }
    for (const auto& key : context.kept) {
      if (key.weight > 1e-6 && !open) largest_score = std::max(largest_score, std::abs(key.score));
    }
    if (dtype == DType::f32) {
      const double sums = sum_error(kept, unit) + sum_error(kept);
      for (std::int64_t c = 0; c < walk.d_v; ++c) {
        double magnitude = 0, weighted = 0, least = 0;
        for (std::size_t j = 0; j < context.kept.size(); ++j) {
          // Where dropout leaves but the least of a row's weights, what they may come out as is all there is.
          least += kLeastWeight * context.kept[j].factor * std::abs(context.kept[j].v[c]);
          const double part = context.kept[j].weight * context.kept[j].factor * std::abs(context.kept[j].v[c]);
          magnitude += part;
          weighted += part * errors.each[j] + kLeastWeight * context.kept[j].factor * std::abs(context.kept[j].v[c]);
        }
        double& allowed = tolerance.out[row * static_cast<std::size_t>(walk.d_v) + static_cast<std::size_t>(c)];
        allowed = weighted + (errors.mean + sums) * magnitude + least + kTiny;
        // The mean errs by its own sum's length, relative to the magnitudes in it.
        if (context.rest > 0) allowed += context.rest * sum_error(walk.longest) * context.mean_magnitude[c];
      }
      return;
    }
    if (open) return;
    const PlainRow plain(context, walk, dtype);
    plain_lse[row] = plain.lse;
    for (std::int64_t c = 0; c < walk.d_v; ++c) {
      const std::size_t at = row * static_cast<std::size_t>(walk.d_v) + static_cast<std::size_t>(c);
      double squares = 0, scores = 0;
      for (const auto& key : context.kept) {
        squares += std::pow(key.weight * key.factor * key.v[c], 2);
        // A score is rounded twice, as a product and scaled: that multiplies a weight, which cannot pass 1.
        const double score = walk.swallowed(key.score) ? 0 : key.score;
        const double deviation = std::abs(score) * std::sqrt(2 * rounding_variance(dtype));
        const double moved = key.weight > 0 ? std::min(1.0, key.weight * std::expm1(deviation)) : 0;
        const double part = moved * (key.factor * key.v[c] - given.out[at]);
        scores += part * part;
      }
      variance = std::max(variance, squares * rounding_variance(dtype));
      by_scores[at] = std::sqrt(scores);
    }
    std::copy(plain.out.begin(), plain.out.end(), plain_out.begin() + context.row * walk.d_v);
  });
  if (dtype != DType::f32) {
    tolerance.out = twice_plain(plain_out, given.out, dtype, variance);
    for (std::size_t i = 0; i < by_scores.size(); ++i) tolerance.out[i] += 2 * 2 * by_scores[i];
    // A kernel may take exponentials of scores in fp16, as the selection compares them.
    const double allowed = 2 * largest_difference(plain_lse, given.lse) + 0x1p-11 * largest_score;
    for (double& value : tolerance.lse) value += allowed;
  }
  for (std::size_t i = 0; i < spread.size(); ++i) {
    if (spread[i] > 0) tolerance.out[i] = spread[i];
  }
  return tolerance;
}

}  // namespace dspattn::check
