// Q^p by experiment: rows of random scores, softmax, selection, sums.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "dspattn/theory_monte_carlo.h"
#include "theory/check.h"
#include "theory/sample_mean.h"

namespace dspattn::theory {
namespace {

// Lower Cholesky factor of the Toeplitz correlation matrix, packed by rows; empty for independent scores.
std::vector<double> correlation_factor(const RowModel& model) {
  if (model.autocorrelation.empty()) return {};
  const auto size = static_cast<std::size_t>(model.keys);
  const auto correlation = [&](std::size_t lag) {
    return lag == 0 ? 1.0 : lag < model.autocorrelation.size() ? model.autocorrelation[lag] : 0.0;
  };
  std::vector<double> factor(size * (size + 1) / 2);
  for (std::size_t i = 0; i < size; ++i) {
    double* row_i = &factor[i * (i + 1) / 2];
    for (std::size_t j = 0; j <= i; ++j) {
      const double* row_j = &factor[j * (j + 1) / 2];
      double rest = correlation(i - j);
      for (std::size_t k = 0; k < j; ++k) rest -= row_i[k] * row_j[k];
      if (j < i) {
        row_i[j] = rest / row_j[j];
      } else {
        Check("simulate_quality")
            .require(rest > 1e-12, "autocorrelation", "positive definite over keys = " + show(model.keys),
                     "a pivot of " + show(rest) + " at key " + show(i))
            .raise();
        row_i[i] = std::sqrt(rest);
      }
    }
  }
  return factor;
}

class RowSource {
 public:
  RowSource(const RowModel& model, std::uint64_t seed)
      : sigma_(model.sigma),
        factor_(correlation_factor(model)),
        noise_(static_cast<std::size_t>(model.keys)),
        engine_(seed) {}

  void draw(std::vector<double>& scores) {
    for (double& value : noise_) value = normal_(engine_);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      double value = noise_[i];
      if (!factor_.empty()) {
        const double* row = &factor_[i * (i + 1) / 2];
        value = std::inner_product(row, row + i + 1, noise_.begin(), 0.0);
      }
      scores[i] = sigma_ * value;
    }
  }

 private:
  double sigma_;
  std::vector<double> factor_;
  std::vector<double> noise_;
  std::mt19937_64 engine_;
  std::normal_distribution<double> normal_;
};

void keep_largest(const std::vector<double>& scores, std::vector<std::int64_t>& candidates, std::int64_t count,
                  std::vector<char>& kept) {
  std::partial_sort(candidates.begin(), candidates.begin() + count, candidates.end(),
                    [&](std::int64_t a, std::int64_t b) {
                      const double left = scores[static_cast<std::size_t>(a)];
                      const double right = scores[static_cast<std::size_t>(b)];
                      return left != right ? left > right : a < b;
                    });
  for (std::int64_t i = 0; i < count; ++i) kept[static_cast<std::size_t>(candidates[static_cast<std::size_t>(i)])] = 1;
}

void select(const Selection& selection, const std::vector<double>& scores, std::vector<char>& kept) {
  std::fill(kept.begin(), kept.end(), char{0});
  const auto keys = static_cast<std::int64_t>(scores.size());
  std::vector<std::int64_t> candidates;
  if (selection.kind == Selection::Kind::nm) {
    const std::int64_t groups = group_count(keys, selection.pattern.group, selection.grouping);
    for (std::int64_t group = 0; group < groups; ++group) {
      candidates.clear();
      for (int element = 0; element < selection.pattern.group; ++element) {
        const std::int64_t key = key_at_place(group, element, selection.pattern.group, selection.grouping);
        if (key < keys) candidates.push_back(key);
      }
      const auto present = static_cast<std::int64_t>(candidates.size());
      keep_largest(scores, candidates, std::min<std::int64_t>(selection.pattern.keep, present), kept);
    }
    return;
  }
  const auto count = std::max<std::int64_t>(1, std::llround(selection.density * static_cast<double>(keys)));
  if (selection.kind == Selection::Kind::topk) {
    candidates.resize(scores.size());
    std::iota(candidates.begin(), candidates.end(), std::int64_t{0});
    keep_largest(scores, candidates, count, kept);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) kept[static_cast<std::size_t>(i * keys / count)] = 1;
}

}  // namespace

Estimate simulate_quality(const Selection& selection, const RowModel& model, Average average, std::int64_t rows,
                          std::uint64_t seed) {
  Check check("simulate_quality");
  check.positive("p", model.p).positive("sigma", model.sigma).at_least("keys", model.keys, 1).at_least("rows", rows, 2);
  if (selection.kind == Selection::Kind::nm) {
    check.pattern(selection.pattern);
    if (selection.grouping == Grouping::interleaved && selection.pattern.group > 0) {
      check.require(kInterleaveBlock % selection.pattern.group == 0, "pattern.group",
                    "a divisor of " + show(kInterleaveBlock) + " for interleaved groups",
                    show(selection.pattern.group));
    }
  } else {
    check.density(selection.density);
  }
  check.raise();
  RowSource source(model, seed);
  std::vector<double> scores(static_cast<std::size_t>(model.keys));
  std::vector<char> kept(scores.size());
  SampleMean ratio;
  SampleRatio means;
  for (std::int64_t row = 0; row < rows; ++row) {
    source.draw(scores);
    select(selection, scores, kept);
    // The definition's weights are a softmax; its normaliser cancels in the ratio but not in the mean of rows, where
    // plain powers are averaged.
    const double reference = average == Average::ratio ? *std::max_element(scores.begin(), scores.end()) : 0.0;
    double all = 0.0;
    double held = 0.0;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const double power = std::exp(model.p * (scores[i] - reference));
      all += power;
      if (kept[i] != 0) held += power;
    }
    ratio.add(held / all);
    means.add(held, all);
  }
  return average == Average::ratio ? ratio.estimate() : means.estimate();
}

Estimate simulate_mean_power(double p, double mu, double sigma, std::int64_t samples, std::uint64_t seed) {
  Check check("simulate_mean_power");
  check.positive("p", p).finite("mu", mu).positive("sigma", sigma).at_least("samples", samples, 2).raise();
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(mu, sigma);
  SampleMean mean;
  for (std::int64_t i = 0; i < samples; ++i) mean.add(std::exp(p * normal(engine)));
  return mean.estimate();
}

}  // namespace dspattn::theory
