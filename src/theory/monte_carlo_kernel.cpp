// Errors of one softmax kernel value by experiment: real vectors, random other keys, random feature matrices.
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

using Vector = std::vector<double>;

double dot(const Vector& a, const Vector& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

struct Pair {
  Vector query, key;
};

// Two vectors with the point's norms and inner product, in the plane of the first two axes.
Pair vectors_at(const KernelPoint& point) {
  const auto size = static_cast<std::size_t>(point.head_dim);
  Pair pair{Vector(size, 0.0), Vector(size, 0.0)};
  const double query_norm = std::sqrt(point.query_norm2);
  pair.query[0] = query_norm;
  pair.key[0] = point.dot / query_norm;
  pair.key[1] = std::sqrt(std::fmax(0.0, point.key_norm2 - pair.key[0] * pair.key[0]));
  return pair;
}

void check_point(const char* function, const KernelPoint& point, std::int64_t samples) {
  Check check(function);
  check.at_least("head_dim", point.head_dim, 2).positive("query_norm2", point.query_norm2);
  check.require(point.dot * point.dot <= point.query_norm2 * point.key_norm2 * (1.0 + 1e-12), "dot",
                "at most |q||k| in size", show(point.dot));
  check.at_least("samples", samples, 2).raise();
}

using Engine = std::mt19937_64;

Vector gaussian_vector(std::size_t size, Engine& engine) {
  std::normal_distribution<double> normal;
  Vector vector(size);
  for (double& value : vector) value = normal(engine);
  return vector;
}

// Random directions: each block of d is a Gaussian matrix made orthogonal row by row (Gram-Schmidt, twice for
// rounding); lengths are those of independent Gaussian vectors.
std::vector<Vector> draw_features(std::int64_t count, std::size_t size, Features kind, Engine& engine) {
  std::vector<Vector> features;
  std::size_t block_start = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    Vector vector = gaussian_vector(size, engine);
    if (kind == Features::orthogonal) {
      if (features.size() - block_start == size) block_start = features.size();
      for (int pass = 0; pass < 2; ++pass) {
        for (std::size_t j = block_start; j < features.size(); ++j) {
          const double along = dot(vector, features[j]) / dot(features[j], features[j]);
          for (std::size_t e = 0; e < size; ++e) vector[e] -= along * features[j][e];
        }
      }
      const Vector length_source = gaussian_vector(size, engine);
      const double scale = std::sqrt(dot(length_source, length_source) / dot(vector, vector));
      for (double& value : vector) value *= scale;
    }
    features.push_back(std::move(vector));
  }
  return features;
}

}  // namespace

Estimate simulate_nm_kernel_mse(Pattern pattern, const KernelPoint& point, std::int64_t samples, std::uint64_t seed) {
  Check("simulate_nm_kernel_mse").pattern(pattern).raise();
  check_point("simulate_nm_kernel_mse", point, samples);
  const auto [query, key] = vectors_at(point);
  const double root = std::sqrt(static_cast<double>(point.head_dim));
  const double own = dot(query, key);
  const double truth = std::exp(own / root);
  Engine engine(seed);
  SampleMean error;
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    int larger = 0;
    for (int other = 1; other < pattern.group; ++other) {
      if (dot(query, gaussian_vector(query.size(), engine)) > own) ++larger;
    }
    const double estimate = larger < pattern.keep ? truth : 0.0;
    error.add((estimate - truth) * (estimate - truth));
  }
  return error.estimate();
}

Estimate simulate_performer_mse(const KernelPoint& point, std::int64_t features, Features kind, std::int64_t samples,
                                std::uint64_t seed) {
  check_point("simulate_performer_mse", point, samples);
  Check("simulate_performer_mse").at_least("features", features, 1).raise();
  auto [query, key] = vectors_at(point);
  const double root = std::sqrt(static_cast<double>(point.head_dim));
  const double truth = std::exp(dot(query, key) / root);
  const double shrink = 1.0 / std::sqrt(root);  // q and k are divided by d^(1/4)
  for (double& value : query) value *= shrink;
  for (double& value : key) value *= shrink;
  const double half_query = 0.5 * dot(query, query);
  const double half_key = 0.5 * dot(key, key);
  Engine engine(seed);
  SampleMean error;
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    double sum = 0.0;
    for (const Vector& w : draw_features(features, query.size(), kind, engine)) {
      sum += std::exp(dot(w, query) - half_query) * std::exp(dot(w, key) - half_key);
    }
    const double difference = sum / static_cast<double>(features) - truth;
    error.add(difference * difference);
  }
  return error.estimate();
}

}  // namespace dspattn::theory
