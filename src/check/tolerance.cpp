#include "check/tolerance.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "check/rounding.h"
#include "core/geometry.h"
#include "core/half.h"

namespace dspattn::check {
namespace {

constexpr double kTiny = 1e-37;            // results may flush below fp32's normal numbers
constexpr double kLeastWeight = 0x1p-126;  // an exponential below fp32's normal numbers may come out as any of them
constexpr double kNothing = 1e-30;         // beside results of 16-bit inputs, where all that is exact is 0
constexpr double kOutOfReach = 1e30;       // a score this far from 0 is its bias, if that is what is extreme
constexpr double kFp16Reach = 60000;       // a 16-bit kernel may hold scores in fp16, clamped to its largest number

// A rank-4 tensor as doubles.
struct Dense {
  std::int64_t heads = 0, rows = 0, width = 0;
  std::vector<double> data;

  Dense() = default;
  explicit Dense(const Tensor& tensor) {
    const ConstTensorView view = tensor.host_view();
    heads = view.extent(1);
    rows = view.extent(2);
    width = view.extent(3);
    data.reserve(static_cast<std::size_t>(view.elements()));
    for (std::int64_t b = 0; b < view.extent(0); ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t c = 0; c < width; ++c) data.push_back(tensor.at(b, h, i, c));
        }
      }
    }
  }
  std::int64_t offset(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return ((b * heads + h) * rows + i) * width;
  }
  const double* row(std::int64_t b, std::int64_t h, std::int64_t i) const { return data.data() + offset(b, h, i); }
};

// What both kinds of tolerance walk over: one query row and its kept keys. With rest = mean all keys that it sees count
// as kept, and the pruned ones have the mean of V.
struct RowContext {
  std::int64_t row = 0;
  const double* q = nullptr;
  const double* d_out = nullptr;  // null in forward
  std::int64_t q_offset = 0;
  std::int64_t query_terms = 1;  // rows that are summed into a key's gradient
  struct Kept {
    const double* k;
    const double* v;
    std::int64_t k_offset, v_offset;
    double score, magnitude, weight;
    double factor, slope;          // dropout's of the weight, a soft cap's of the score
    std::int64_t bias_offset = 0;  // in the gradient of the bias
    bool pruned = false;
  };
  std::vector<Kept> kept;
  double rest = 0;                         // the weight of the pruned ones
  const double* mean_magnitude = nullptr;  // [d_v], with rest = mean
  std::int64_t head = 0;
  double sink = -std::numeric_limits<double>::infinity();
  double sink_weight = 0;
  double d_lse = 0;
};

// fp16's lowest number as a bias: GPU kernels take sums below -65408 * 2^e for that (docs/fused_kernel.md).
bool lowest_fp16_on_gpu(const CaseData& data) {
  return data.drawn().lowest_bias && data.drawn().bias_dtype == DType::f16 &&
         data.device_problem().device.type == DeviceType::cuda;
}

class Walk {
 public:
  Walk(const CaseData& data, const cpu::Reference& given)
      : clamps(data.drawn().dtype != DType::f32 &&
               (data.drawn().extreme_bias || data.drawn().extreme_scale || lowest_fp16_on_gpu(data))),
        swallows_(data.drawn().lowest_bias || data.drawn().extreme_bias),
        given_(given),
        host_(data.host_problem()),
        q_(data.q()),
        k_(data.k()),
        v_(data.v()) {
    if (data.d_out().present()) d_out_ = Dense(data.d_out());
    if (data.d_lse().present()) d_lse_ = &data.d_lse();
    cap = host_.soft_cap.value_or(0);
    scale = core::geometry_of(host_).scale;
    d = q_.width;
    d_v = v_.width;
    longest = v_.rows;
  }

  // Calls visit(row) for every row that has a finite LSE: neither empty nor NaN.
  template <typename Visit>
  void each_row(Visit visit) const {
    const std::int64_t group = k_.heads > 0 ? q_.heads / k_.heads : 1;
    for (const cpu::Sequence& seq : cpu::sequences_of(host_)) {
      for (std::int64_t h = 0; h < q_.heads; ++h) {
        for (std::int64_t i = 0; i < seq.n_q; ++i) {
          RowContext context;
          context.row = (seq.batch * q_.heads + h) * q_.rows + seq.q_begin + i;
          if (!std::isfinite(given_.lse[static_cast<std::size_t>(context.row)])) continue;
          context.q = q_.row(seq.batch, h, seq.q_begin + i);
          context.q_offset = q_.offset(seq.batch, h, seq.q_begin + i);
          if (!d_out_.data.empty()) context.d_out = d_out_.row(seq.batch, h, seq.q_begin + i);
          context.query_terms = seq.n_q * group;
          if (mean()) context.mean_magnitude = given_.mean_magnitudes.data() + context.row * d_v;
          context.head = h;
          if (d_lse_ != nullptr) context.d_lse = d_lse_->at(seq.batch, h, seq.q_begin + i);
          if (host_.sinks.present()) context.sink = core::load_element(host_.sinks.data, DType::f32, h);
          const double largest = std::max(context.sink, largest_counted(context.row, seq.n_k));
          context.sink_weight = std::exp(context.sink - largest);
          double sum = context.sink_weight;
          for (std::int64_t j = 0; j < seq.n_k; ++j) {
            if (!counts(context.row, j)) continue;
            const double score = given_.scores.at(context.row, j);
            const bool pruned = !given_.selection.at(context.row, j);
            const double* value =
                pruned ? given_.means.data() + context.row * d_v : v_.row(seq.batch, h / group, seq.k_begin + j);
            context.kept.push_back(
                {k_.row(seq.batch, h / group, seq.k_begin + j), value, k_.offset(seq.batch, h / group, seq.k_begin + j),
                 v_.offset(seq.batch, h / group, seq.k_begin + j), score, given_.magnitudes.at(context.row, j),
                 std::exp(score - largest), given_.factors.at(context.row, j), given_.slopes.at(context.row, j),
                 bias_offset(seq.index, h, i, j), pruned});
            sum += context.kept.back().weight;
          }
          context.sink_weight /= sum;
          for (auto& key : context.kept) {
            key.weight /= sum;
            if (key.pruned) context.rest += key.weight;
          }
          visit(context);
        }
      }
    }
  }

  // Whether a score (or an LSE) is a bias that has swallowed the product: it has the same bits in every precision.
  bool swallowed(double score) const { return swallows_ && std::abs(score) > kOutOfReach; }

  // A scaled product under the soft cap, if there is one.
  double capped(double scaled) const { return cap > 0 ? cap * std::tanh(scaled / cap) : scaled; }

  double cap = 0;       // 0: none
  bool clamps = false;  // scores may be beyond what a 16-bit kernel holds them in
  double scale = 1;
  std::int64_t d = 0, d_v = 0;
  std::int64_t longest = 0;  // keys that a mean may be over

 private:
  bool mean() const { return host_.rest == Rest::mean; }

  // Whether a key has a weight.
  bool counts(std::int64_t row, std::int64_t j) const {
    const bool visible = given_.scores.at(row, j) != -std::numeric_limits<double>::infinity();
    return given_.selection.at(row, j) != 0 || (mean() && visible);
  }

  double largest_counted(std::int64_t row, std::int64_t keys) const {
    double largest = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = 0; j < keys; ++j) {
      if (counts(row, j)) largest = std::max(largest, given_.scores.at(row, j));
    }
    return largest;
  }

  std::int64_t bias_offset(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) const {
    const ConstTensorView& bias = host_.mask.bias;
    const std::int64_t index[4] = {i0, i1, i2, i3};
    std::int64_t place = 0;
    for (int dim = 0; dim < bias.rank; ++dim) {
      place = place * bias.extent(dim) + (bias.extent(dim) == 1 ? 0 : index[dim]);
    }
    return place;
  }

  bool swallows_ = false;
  const Tensor* d_lse_ = nullptr;
  const cpu::Reference& given_;
  const Problem& host_;
  Dense q_, k_, v_, d_out_;
};

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(a[i]) && std::isfinite(b[i])) largest = std::max(largest, std::abs(a[i] - b[i]));
  }
  return largest;
}

double largest_magnitude(const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

// Twice the plain computation's error, as it came out or as it is expected: over the few elements of a small problem
// its roundings can cancel by chance. `variance` is that of one element's error, the largest of all elements.
std::vector<double> twice_plain(const std::vector<double>& plain, const std::vector<double>& exact, DType dtype,
                                double variance) {
  const double error = std::max(largest_difference(plain, exact), 2 * std::sqrt(variance));
  return std::vector<double>(exact.size(), 2 * error + core::epsilon_of(dtype) * largest_magnitude(exact) + kNothing);
}

// Variance of a rounding error relative to the number rounded: uniform over half a unit in the last place.
double rounding_variance(DType dtype) { return core::epsilon_of(dtype) * core::epsilon_of(dtype) / 12; }

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
bool weights_are_open(const RowContext& context, const Walk& walk, const ScoreErrors& errors) {
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

}  // namespace

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
    if (!weights_are_open(context, walk, ScoreErrors(context, walk, unit))) return;
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
