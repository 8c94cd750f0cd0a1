// One row of the oracle (reference.h): its scores, its choice and its result, in fp64 from the contract alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "core/dropout.h"
#include "core/half.h"
#include "cpu/reference.h"

namespace dspattn::cpu::plain {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

inline double element(const ConstTensorView& view, std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) {
  return core::load_element(view.data, view.dtype,
                            i0 * view.step(0) + i1 * view.step(1) + i2 * view.step(2) + i3 * view.step(3));
}

// A mask tensor's element: an extent of 1 broadcasts.
inline double broadcast_element(const ConstTensorView& view, std::int64_t i0, std::int64_t i1, std::int64_t i2,
                                std::int64_t i3) {
  return element(view, view.extent(0) == 1 ? 0 : i0, view.extent(1) == 1 ? 0 : i1, view.extent(2) == 1 ? 0 : i2,
                 view.extent(3) == 1 ? 0 : i3);
}

// Where the gradient of that element stands among those of the tensor's elements: one that is broadcast has one place.
inline std::size_t bias_index(const ConstTensorView& view, std::int64_t i0, std::int64_t i1, std::int64_t i2,
                              std::int64_t i3) {
  const std::int64_t index[4] = {i0, i1, i2, i3};
  std::int64_t place = 0;
  for (int dim = 0; dim < 4; ++dim) place = place * view.extent(dim) + (view.extent(dim) == 1 ? 0 : index[dim]);
  return static_cast<std::size_t>(place);
}

inline std::int64_t int_element(const ConstTensorView& view, std::int64_t index) {
  return static_cast<std::int64_t>(core::load_element(view.data, view.dtype, index * view.step(0)));
}

// A rank-4 tensor as contiguous doubles.
struct Values {
  std::int64_t heads = 0, rows = 0, width = 0;
  std::vector<double> data;

  explicit Values(const ConstTensorView& view) : heads(view.extent(1)), rows(view.extent(2)), width(view.extent(3)) {
    data.reserve(static_cast<std::size_t>(view.elements()));
    for (std::int64_t b = 0; b < view.extent(0); ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t c = 0; c < width; ++c) data.push_back(element(view, b, h, i, c));
        }
      }
    }
  }
  std::int64_t offset(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return ((b * heads + h) * rows + i) * width;
  }
  const double* row(std::int64_t b, std::int64_t h, std::int64_t i) const { return data.data() + offset(b, h, i); }
};

// Everything about one query row.
struct Row {
  std::vector<double> scores;  // S; masked = -inf
  std::vector<double> keys;    // selection keys; masked = -inf
  std::vector<double> magnitudes;
  std::vector<double> slopes;   // dS / d(scale * q.k)
  std::vector<double> factors;  // of the weights: what dropout makes of them
  std::vector<std::uint8_t> kept;
  std::vector<Choice> choices;
  std::vector<double> weights;  // softmax of the kept scores; 0 elsewhere. With rest = mean: of all visible scores
  double sink_weight = 0;
  std::vector<double> mean;  // of V, for the pruned keys; empty when there are none or their weight is dropped
  std::vector<double> mean_magnitude;
  std::vector<double> out;
  double lse = -kInfinity;
};

class Oracle {
 public:
  explicit Oracle(const Problem& problem) : problem_(problem), q_(problem.q), k_(problem.k), v_(problem.v) {
    // Without elements there is no d to take the root of, and no score either.
    scale_ = problem.scale.value_or(q_.width > 0 ? 1.0 / std::sqrt(static_cast<double>(q_.width)) : 1.0);
    selection_factor_ = 1.0;
    while (selection_factor_ > scale_) selection_factor_ /= 2;
    while (selection_factor_ * 2 <= scale_) selection_factor_ *= 2;
    queries_per_key_head_ = k_.heads > 0 ? q_.heads / k_.heads : 1;
    if (!problem.pattern.is_dense()) groups_ = groups(k_.rows);
    seed_ = problem.dropout.seed;
    offset_ = problem.dropout.offset;
    if (const ConstTensorView& state = problem.dropout.state; state.present()) {
      const auto word = [&](std::int64_t index) {
        return std::uint64_t{static_cast<std::uint32_t>(int_element(state, index))};
      };
      seed_ = word(0) | word(1) << 32;
      offset_ = word(2) | word(3) << 32;
    }
  }

  const Values& q() const { return q_; }
  const Values& k() const { return k_; }
  const Values& v() const { return v_; }
  double scale() const { return scale_; }
  std::int64_t key_head(std::int64_t head) const { return head / queries_per_key_head_; }
  std::int64_t row_index(const Sequence& seq, std::int64_t head, std::int64_t i) const {
    return (seq.batch * q_.heads + head) * q_.rows + seq.q_begin + i;
  }

  Row row(const Sequence& seq, std::int64_t head, std::int64_t i, const Selection* given) const {
    Row row;
    fill_scores(row, seq, head, i, problem_.soft_cap);
    fill_factors(row, seq, head, i);
    row.kept.assign(static_cast<std::size_t>(seq.n_k), 0);
    row.weights.assign(static_cast<std::size_t>(seq.n_k), 0.0);
    row.out.assign(static_cast<std::size_t>(v_.width), 0.0);
    const bool together = problem_.choice == dspattn::Choice::shared && !problem_.pattern.is_dense();
    for (const double score : row.scores) {
      if (std::isnan(score) || (together && score == kInfinity)) {
        row.lse = kNaN;
        std::fill(row.out.begin(), row.out.end(), kNaN);
        return row;
      }
    }
    if (given != nullptr) {
      for (std::int64_t j = 0; j < seq.n_k; ++j) {
        const auto at = static_cast<std::size_t>(j);
        row.kept[at] = given->at(row_index(seq, head, i), j) != 0 && row.scores[at] != -kInfinity;
      }
    } else if (together) {
      choose_together(row, seq, head, i);
    } else {
      choose(row, row_index(seq, head, i));
    }
    softmax(row, sink(head));
    if (problem_.rest == Rest::mean && prunes_any(row)) fill_mean(row, seq, head, i);
    for (std::int64_t j = 0; j < seq.n_k; ++j) {
      const auto at = static_cast<std::size_t>(j);
      const bool kept = row.kept[at] != 0;
      if (!kept && (row.mean.empty() || row.weights[at] == 0)) continue;
      const double* value = kept ? v_.row(seq.batch, key_head(head), seq.k_begin + j) : row.mean.data();
      const double weight = row.weights[at] * row.factors[at];
      double* out = row.out.data();
      for (std::int64_t c = 0; c < v_.width; ++c) out[c] += weight * value[c];
    }
    if (std::isnan(row.lse)) std::fill(row.out.begin(), row.out.end(), kNaN);
    return row;
  }

 private:
  // Mask before prune: which keys the query may see, apart from a bias of -inf.
  bool visible(const Sequence& seq, std::int64_t head, std::int64_t i, std::int64_t j) const {
    const Mask& mask = problem_.mask;
    return in_interval(seq, i, j) &&
           (!mask.allowed.present() || broadcast_element(mask.allowed, seq.index, head, i, j) != 0.0);
  }

  // Which keys the query sees by causality, window and length: an interval.
  bool in_interval(const Sequence& seq, std::int64_t i, std::int64_t j) const {
    const Mask& mask = problem_.mask;
    const std::int64_t aligned = mask.alignment == Alignment::bottom_right ? i + seq.n_k - seq.n_q : i;
    const std::int64_t position = aligned + mask.offset;
    if (mask.causal && j > position) return false;
    if (mask.window_left && position - j > *mask.window_left) return false;
    if (mask.window_right && j - position > *mask.window_right) return false;
    return !mask.key_lengths.present() || j < int_element(mask.key_lengths, seq.index);
  }

  // Whether a mask tensor, which has one query row with rest = mean, hides the key.
  bool hidden(const Sequence& seq, std::int64_t head, std::int64_t j) const {
    const Mask& mask = problem_.mask;
    if (mask.allowed.present() && broadcast_element(mask.allowed, seq.index, head, 0, j) == 0.0) return true;
    return mask.bias.present() && broadcast_element(mask.bias, seq.index, head, 0, j) == -kInfinity;
  }

  static bool prunes_any(const Row& row) {
    for (std::size_t j = 0; j < row.scores.size(); ++j) {
      if (!row.kept[j] && row.scores[j] != -kInfinity) return true;
    }
    return false;
  }

  // The mean of V over the whole blocks of 128 keys inside the row's interval, without the keys that a mask hides; over
  // the interval itself where no block lies in it, or none with a key that is not hidden.
  void fill_mean(Row& row, const Sequence& seq, std::int64_t head, std::int64_t i) const {
    constexpr std::int64_t kBlock = 128;
    std::vector<std::int64_t> of_blocks, of_interval;
    for (std::int64_t start = 0; start < seq.n_k; start += kBlock) {
      const std::size_t before = of_blocks.size();
      bool whole = start + kBlock <= seq.n_k;
      for (std::int64_t j = start; j < std::min(start + kBlock, seq.n_k); ++j) {
        whole = whole && in_interval(seq, i, j);
        if (!in_interval(seq, i, j) || hidden(seq, head, j)) continue;
        of_blocks.push_back(j);
        of_interval.push_back(j);
      }
      if (!whole) of_blocks.resize(before);
    }
    const std::vector<std::int64_t>& keys = of_blocks.empty() ? of_interval : of_blocks;
    row.mean.assign(static_cast<std::size_t>(v_.width), 0.0);
    row.mean_magnitude = row.mean;
    for (const std::int64_t j : keys) {
      const double* value = v_.row(seq.batch, key_head(head), seq.k_begin + j);
      for (std::int64_t c = 0; c < v_.width; ++c) {
        row.mean[static_cast<std::size_t>(c)] += value[c] / static_cast<double>(keys.size());
        row.mean_magnitude[static_cast<std::size_t>(c)] += std::abs(value[c]) / static_cast<double>(keys.size());
      }
    }
  }

  void fill_scores(Row& row, const Sequence& seq, std::int64_t head, std::int64_t i,
                   const std::optional<double>& soft_cap) const {
    row.scores.assign(static_cast<std::size_t>(seq.n_k), -kInfinity);
    row.keys = row.scores;
    row.magnitudes.assign(static_cast<std::size_t>(seq.n_k), 0.0);
    row.slopes.assign(static_cast<std::size_t>(seq.n_k), 1.0);
    const double* query = q_.row(seq.batch, head, seq.q_begin + i);
    const Mask& mask = problem_.mask;
    for (std::int64_t j = 0; j < seq.n_k; ++j) {
      if (!visible(seq, head, i, j)) continue;
      const double* key = k_.row(seq.batch, key_head(head), seq.k_begin + j);
      double product = 0, magnitude = 0;
      for (std::int64_t c = 0; c < q_.width; ++c) {
        product += query[c] * key[c];
        magnitude += std::abs(query[c] * key[c]);
      }
      const double bias = mask.bias.present() ? broadcast_element(mask.bias, seq.index, head, i, j) : 0.0;
      const auto at = static_cast<std::size_t>(j);
      double scaled = scale_ * product;
      const bool masked = bias == -kInfinity || scaled == -kInfinity;
      if (soft_cap) {
        const double hyperbolic = std::tanh(scaled / *soft_cap);
        scaled = *soft_cap * hyperbolic;
        row.slopes[at] = 1 - hyperbolic * hyperbolic;
      }
      row.scores[at] = masked ? -kInfinity : scaled + bias;
      if (row.scores[at] != -kInfinity) row.keys[at] = selection_key(product + bias / scale_);
      row.magnitudes[at] = scale_ * magnitude + std::abs(bias);
    }
  }

  double sink(std::int64_t head) const {
    const ConstTensorView& sinks = problem_.sinks;
    return sinks.present() ? core::load_element(sinks.data, sinks.dtype, head * sinks.step(0)) : -kInfinity;
  }

  void fill_factors(Row& row, const Sequence& seq, std::int64_t head, std::int64_t i) const {
    const double probability = problem_.dropout.probability;
    row.factors.assign(static_cast<std::size_t>(seq.n_k), 1.0);
    if (probability == 0) return;
    const auto bits_of = core::DropoutRow::of(seed_, offset_, static_cast<std::uint32_t>(seq.index),
                                              static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(i));
    for (std::size_t j = 0; j < row.factors.size(); ++j) {
      const bool dropped = bits_of.bits(static_cast<std::uint32_t>(j)) < core::dropout_threshold(probability);
      row.factors[j] = dropped ? 0.0 : 1 / (1 - probability);
    }
  }

  // What is compared: a function of the inputs alone.
  double selection_key(double unscaled) const {
    // In fp32's precision but not in its range: bias / scale may be beyond it, and is no tie for that.
    if (problem_.q.dtype == DType::f32 && std::isfinite(unscaled)) {
      int exponent = 0;
      const double fraction = std::frexp(unscaled, &exponent);
      return std::ldexp(static_cast<double>(static_cast<float>(fraction)), exponent);
    }
    if (problem_.q.dtype == DType::f32) return unscaled;
    const double rounded = core::round_to_f16(unscaled * selection_factor_);
    return std::clamp(rounded, -core::kMaxF16, core::kMaxF16);
  }

  // The groups of a row of n keys, each in ascending key order.
  std::vector<std::vector<std::int64_t>> groups(std::int64_t n) const {
    const std::int64_t size = problem_.pattern.group;
    std::vector<std::vector<std::int64_t>> result;
    const bool interleaved = problem_.grouping == Grouping::interleaved;
    const std::int64_t block = interleaved ? 128 : size;
    const std::int64_t stride = block / size;
    for (std::int64_t start = 0; start < n; start += block) {
      for (std::int64_t r = 0; r < stride; ++r) {
        std::vector<std::int64_t> group;
        for (std::int64_t t = 0; t < size; ++t) {
          if (start + r + t * stride < n) group.push_back(start + r + t * stride);
        }
        result.push_back(group);
      }
    }
    return result;
  }

  void choose(Row& row, std::int64_t row_number) const {
    if (problem_.pattern.is_dense()) {
      for (std::size_t j = 0; j < row.scores.size(); ++j) row.kept[j] = row.scores[j] != -kInfinity;
      return;
    }
    std::vector<std::int64_t> candidates;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      candidates.clear();
      for (const std::int64_t j : groups_[g]) {
        const auto at = static_cast<std::size_t>(j);
        if (at < row.scores.size() && row.scores[at] != -kInfinity) candidates.push_back(j);
      }
      std::stable_sort(candidates.begin(), candidates.end(), [&](std::int64_t a, std::int64_t b) {
        return row.keys[static_cast<std::size_t>(a)] > row.keys[static_cast<std::size_t>(b)];
      });
      const auto keep = static_cast<std::size_t>(problem_.pattern.keep);
      for (std::size_t rank = 0; rank < std::min(keep, candidates.size()); ++rank) {
        row.kept[static_cast<std::size_t>(candidates[rank])] = 1;
      }
      if (candidates.size() > keep) {
        const double smallest_kept = row.keys[static_cast<std::size_t>(candidates[keep - 1])];
        const double largest_dropped = row.keys[static_cast<std::size_t>(candidates[keep])];
        row.choices.push_back({row_number, static_cast<std::int64_t>(g), smallest_kept - largest_dropped});
      }
    }
  }

  // The heads that share a key head choose by the sum of their weights before pruning, softmax(S) without cap or sink,
  // among the keys that any of them sees. A head whose weights are undefined, as its result then is, does not count.
  void choose_together(Row& row, const Sequence& seq, std::int64_t head, std::int64_t i) const {
    Row common;
    common.scores.assign(static_cast<std::size_t>(seq.n_k), -kInfinity);
    common.keys = common.scores;
    common.kept.assign(static_cast<std::size_t>(seq.n_k), 0);
    const std::int64_t first = key_head(head) * queries_per_key_head_;
    for (std::int64_t other = first; other < first + queries_per_key_head_; ++other) {
      Row full;
      fill_scores(full, seq, other, i, std::nullopt);
      full.weights.assign(full.scores.size(), 0.0);
      full.kept.assign(full.scores.size(), 0);
      for (std::size_t j = 0; j < full.scores.size(); ++j) full.kept[j] = full.scores[j] != -kInfinity;
      softmax(full, -kInfinity);
      if (std::isnan(full.lse)) continue;
      for (std::size_t j = 0; j < full.scores.size(); ++j) {
        if (!full.kept[j]) continue;
        common.scores[j] = 0;
        common.keys[j] = std::max(common.keys[j], 0.0) + full.weights[j];
      }
    }
    choose(common, row_index(seq, head, i));
    for (std::size_t j = 0; j < row.scores.size(); ++j) {
      row.kept[j] = common.kept[j] != 0 && row.scores[j] != -kInfinity;
      row.keys[j] = row.scores[j] != -kInfinity ? common.keys[j] : -kInfinity;
    }
    row.choices = std::move(common.choices);
  }

  void softmax(Row& row, double sink) const {
    const auto counts = [&](std::size_t j) {
      return row.kept[j] != 0 || (problem_.rest == Rest::mean && row.scores[j] != -kInfinity);
    };
    double largest = sink;
    for (std::size_t j = 0; j < row.scores.size(); ++j) {
      if (counts(j)) largest = std::max(largest, row.scores[j]);
    }
    if (largest == -kInfinity) return;           // an empty row: output 0, LSE -inf
    row.sink_weight = std::exp(sink - largest);  // +inf - +inf is NaN, and so is the row
    double sum = row.sink_weight;
    for (std::size_t j = 0; j < row.scores.size(); ++j) {
      if (!counts(j)) continue;
      row.weights[j] = std::exp(row.scores[j] - largest);  // the same
      sum += row.weights[j];
    }
    for (double& weight : row.weights) weight /= sum;
    row.sink_weight /= sum;
    row.lse = largest + std::log(sum);
  }

  const Problem& problem_;
  Values q_, k_, v_;
  std::vector<std::vector<std::int64_t>> groups_;  // of the longest sequence; a shorter one has a prefix of its keys
  double scale_ = 1;
  double selection_factor_ = 1;  // 2^-e
  std::int64_t queries_per_key_head_ = 1;
  std::uint64_t seed_ = 0, offset_ = 0;  // of dropout
};

}  // namespace dspattn::cpu::plain
