#include <algorithm>
#include <cmath>
#include <utility>

#include "check/rounding.h"
#include "check/row_errors.h"
#include "check/row_walk.h"
#include "check/tolerance.h"

namespace dspattn::check {

BackwardTolerance backward_tolerance(const CaseData& data, const cpu::Reference& given, const cpu::Gradients& gradients,
                                     const ForwardTolerance& forward) {
  const Walk walk(data, given);
  const DType dtype = data.drawn().dtype;
  const double unit = product_unit(data.device_problem());
  const bool precise = dtype == DType::f32;
  const auto round = [&](double value) { return core::round_to(dtype, value); };
  // fp32: bounds on the error. 16-bit: the plain gradients.
  const auto zeros = [](const std::vector<double>& like) { return std::vector<double>(like.size(), 0.0); };
  cpu::Gradients sums{zeros(gradients.d_q), zeros(gradients.d_k), zeros(gradients.d_v), zeros(gradients.d_bias),
                      zeros(gradients.d_sinks)};

  // 16-bit: what the rounding of the output, from which dO.O is made, may do to the gradients of q and k.
  cpu::Gradients handed = sums;
  cpu::Gradients variance = sums;  // of the plain gradients' errors

  // Terms of a sum in the gradient of a bias, at most.
  const double bias_sum = sums.d_bias.empty() ? 0 : sum_error(static_cast<std::int64_t>(given.scores.values.size()));

  const auto add_bounds = [&](const RowContext& context) {
    const auto kept = static_cast<std::int64_t>(context.kept.size());
    const double lse = given.lse[static_cast<std::size_t>(context.row)];
    const ScoreErrors errors(context, walk, unit);
    // Relative error of every weight: of the sum, and of the LSE that forward stored in fp32. An LSE out of reach tells
    // nothing of the weights; backward has to find them without it.
    const double of_lse = walk.swallowed(lse) ? 0.0 : std::abs(lse);
    const double common_error = errors.mean + sum_error(kept) + 8 * kUnitF32 * (1 + of_lse);
    const double sums_error = errors.mean + sum_error(kept, unit) + sum_error(kept);
    // dO.O - dLSE, and what O's own error and the sum add to it
    double d_dot = -context.d_lse, d_dot_error = kUnitF32 * std::abs(context.d_lse);
    for (std::int64_t c = 0; c < walk.d_v; ++c) {
      double out = 0, out_magnitude = 0, weighted = 0;
      for (std::size_t j = 0; j < context.kept.size(); ++j) {
        const auto& key = context.kept[j];
        const double weight = key.weight * key.factor;
        out += weight * key.v[c];
        out_magnitude += weight * std::abs(key.v[c]);
        weighted += weight * std::abs(key.v[c]) * errors.each[j] + kLeastWeight * key.factor * std::abs(key.v[c]);
      }
      d_dot += context.d_out[c] * out;
      d_dot_error += std::abs(context.d_out[c]) * (weighted + out_magnitude * (sums_error + sum_error(walk.d_v)));
    }
    const double summed = sum_error(context.query_terms, unit) + sum_error(kept, unit);
    for (std::size_t j = 0; j < context.kept.size(); ++j) {
      const auto& key = context.kept[j];
      const double weight_error = errors.each[j] + common_error;
      double d_weight = 0, d_weight_magnitude = 0;
      for (std::int64_t c = 0; c < walk.d_v; ++c) {
        d_weight += key.factor * context.d_out[c] * key.v[c];
        d_weight_magnitude += key.factor * std::abs(context.d_out[c] * key.v[c]);
        sums.d_v[static_cast<std::size_t>(key.v_offset + c)] +=
            key.factor * (key.weight * (weight_error + summed) + kLeastWeight) * std::abs(context.d_out[c]);
      }
      const double d_score = key.weight * (d_weight - d_dot);
      const double d_score_error = std::abs(d_score) * (weight_error + summed) +
                                   key.weight * (d_weight_magnitude * sum_error(walk.d_v, unit) + d_dot_error) +
                                   kLeastWeight * (d_weight_magnitude + std::abs(d_dot));
      if (!sums.d_bias.empty()) {
        sums.d_bias[static_cast<std::size_t>(key.bias_offset)] += d_score_error + bias_sum * std::abs(d_score);
      }
      double d_product_error = key.slope * d_score_error;
      if (walk.cap > 0) {  // the slope is 1 - t^2, and t errs with the score
        const double t = std::sqrt(1 - key.slope);
        d_product_error += std::abs(d_score) * (2 * t * errors.each[j] / walk.cap + 8 * kUnitF32);
      }
      for (std::int64_t c = 0; c < walk.d; ++c) {
        sums.d_q[static_cast<std::size_t>(context.q_offset + c)] += walk.scale * d_product_error * std::abs(key.k[c]);
        sums.d_k[static_cast<std::size_t>(key.k_offset + c)] += walk.scale * d_product_error * std::abs(context.q[c]);
      }
    }
  };

  const auto add_plain = [&](const RowContext& context) {
    const PlainRow plain(context, walk, dtype);
    double d_dot = -context.d_lse, d_dot_rounding = 0;
    for (std::int64_t c = 0; c < walk.d_v; ++c) {
      const double part = context.d_out[c] * plain.out[static_cast<std::size_t>(c)];
      d_dot += part;
      d_dot_rounding += std::abs(part) * core::epsilon_of(dtype) / 2;
    }
    for (std::size_t j = 0; j < context.kept.size(); ++j) {
      const auto& key = context.kept[j];
      double d_weight = 0;
      for (std::int64_t c = 0; c < walk.d_v; ++c) {
        d_weight += context.d_out[c] * key.v[c];
        const double part = plain.dropped[j] * context.d_out[c];
        sums.d_v[static_cast<std::size_t>(key.v_offset + c)] += part;
        variance.d_v[static_cast<std::size_t>(key.v_offset + c)] += part * part * rounding_variance(dtype);
      }
      d_weight *= key.factor;
      const double of_score = round(plain.weights[j] * (round(d_weight) - d_dot));
      if (!sums.d_bias.empty()) {
        const auto at = static_cast<std::size_t>(key.bias_offset);
        sums.d_bias[at] += of_score;
        variance.d_bias[at] +=
            (3 * of_score * of_score + std::pow(key.weight * d_weight, 2)) * rounding_variance(dtype);
        handed.d_bias[at] += key.weight * d_dot_rounding;
      }
      const double d_score = round(walk.scale * round(of_score * round(key.slope)));
      for (std::int64_t c = 0; c < walk.d; ++c) {
        sums.d_q[static_cast<std::size_t>(context.q_offset + c)] += d_score * key.k[c];
        sums.d_k[static_cast<std::size_t>(key.k_offset + c)] += d_score * context.q[c];
        // Rounded are dP, the weight, dS and its product with the scale.
        const double squares = 3 * d_score * d_score + std::pow(walk.scale * key.slope * key.weight * d_weight, 2);
        variance.d_q[static_cast<std::size_t>(context.q_offset + c)] +=
            squares * key.k[c] * key.k[c] * rounding_variance(dtype);
        variance.d_k[static_cast<std::size_t>(key.k_offset + c)] +=
            squares * context.q[c] * context.q[c] * rounding_variance(dtype);
        const double rounding = walk.scale * key.slope * key.weight * d_dot_rounding;
        handed.d_q[static_cast<std::size_t>(context.q_offset + c)] += rounding * std::abs(key.k[c]);
        handed.d_k[static_cast<std::size_t>(key.k_offset + c)] += rounding * std::abs(context.q[c]);
      }
    }
  };

  // A sink's gradient is made of what forward stored.
  std::vector<double> of_sinks = zeros(gradients.d_sinks);
  const auto add_sink = [&](const RowContext& context) {
    const auto row = static_cast<std::size_t>(context.row);
    double d_dot = std::abs(context.d_lse), d_dot_error = 0;
    for (std::int64_t c = 0; c < walk.d_v; ++c) {
      const std::size_t at = row * static_cast<std::size_t>(walk.d_v) + static_cast<std::size_t>(c);
      d_dot += std::abs(context.d_out[c] * given.out[at]);
      d_dot_error += std::abs(context.d_out[c]) * forward.out[at];
    }
    const double weight_error = std::expm1(std::min(1.0, forward.lse[row])) + kUnitF32 * (8 + std::abs(context.sink));
    const double sum = sum_error(context.query_terms) + sum_error(walk.d_v);
    of_sinks[static_cast<std::size_t>(context.head)] +=
        context.sink_weight * ((weight_error + sum) * d_dot + d_dot_error);
  };

  // Rows whose weights a 16-bit kernel may find anew, among scores that it had to clamp: they are any.
  const auto add_open = [&](const RowContext& context) {
    if (!weights_are_open(context, walk, ScoreErrors(context, walk, unit)) && !fp16_scores_decide(context, walk))
      return;
    double most = 0;  // of dP
    for (const auto& key : context.kept) {
      double d_weight = 0;
      for (std::int64_t c = 0; c < walk.d_v; ++c) d_weight += key.factor * context.d_out[c] * key.v[c];
      most = std::max(most, std::abs(d_weight));
    }
    constexpr double kAny = 2.01;  // the difference of two that are at most 1, and their rounding
    for (const auto& key : context.kept) {
      for (std::int64_t c = 0; c < walk.d_v; ++c) {
        handed.d_v[static_cast<std::size_t>(key.v_offset + c)] += kAny * key.factor * std::abs(context.d_out[c]);
      }
      if (!handed.d_bias.empty()) handed.d_bias[static_cast<std::size_t>(key.bias_offset)] += kAny * most;
      for (std::int64_t c = 0; c < walk.d; ++c) {
        const double d_score = kAny * walk.scale * most;
        handed.d_q[static_cast<std::size_t>(context.q_offset + c)] += d_score * std::abs(key.k[c]);
        handed.d_k[static_cast<std::size_t>(key.k_offset + c)] += d_score * std::abs(context.q[c]);
      }
    }
  };

  walk.each_row([&](const RowContext& context) {
    precise ? add_bounds(context) : add_plain(context);
    if (context.sink_weight > 0) add_sink(context);
    if (!precise && walk.clamps) add_open(context);
  });
  BackwardTolerance tolerance;
  const auto finish = [&](std::vector<double>& sum, const std::vector<double>& exact, const std::vector<double>& extra,
                          const std::vector<double>& variances) {
    std::vector<double> allowed;
    if (precise) {
      allowed = std::move(sum);
      for (std::size_t i = 0; i < allowed.size(); ++i) allowed[i] += kUnitF32 * std::abs(exact[i]) + kTiny;
    } else {
      for (double& value : sum) value = round(value);
      allowed = twice_plain(sum, exact, dtype, largest_magnitude(variances));
      for (std::size_t i = 0; i < allowed.size(); ++i) allowed[i] += extra[i];
    }
    return allowed;
  };
  tolerance.d_q = finish(sums.d_q, gradients.d_q, handed.d_q, variance.d_q);
  tolerance.d_k = finish(sums.d_k, gradients.d_k, handed.d_k, variance.d_k);
  tolerance.d_v = finish(sums.d_v, gradients.d_v, handed.d_v, variance.d_v);
  tolerance.d_bias = finish(sums.d_bias, gradients.d_bias, handed.d_bias, variance.d_bias);
  tolerance.d_sinks = of_sinks;
  for (std::size_t h = 0; h < of_sinks.size(); ++h) {
    tolerance.d_sinks[h] += kUnitF32 * std::abs(gradients.d_sinks[h]) + kTiny;
  }
  return tolerance;
}

}  // namespace dspattn::check
