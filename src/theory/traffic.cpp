// Memory traffic of attention in elements, and the speedups that follow when traffic decides.
//
// A product (a x c)(c x b) in T x T output tiles reads each operand once per tile row or column, a b c / T each, and
// writes a b. N:M halves (keep/group) what is written, what softmax touches and the left operand of A V, adds metadata
// to the first and the last, and still reads all of V: every group of values has a kept member in some row of a tile.
#include <bit>
#include <cmath>

#include "dspattn/theory.h"
#include "theory/check.h"

namespace dspattn::theory {
namespace {

void add_shape(Check& check, std::int64_t head_dim, std::int64_t tile) {
  check.at_least("head_dim", head_dim, 1).at_least("tile", tile, 1);
}

void check_shape(const char* function, const Shape& shape, double density = 1.0) {
  Check check(function);
  check.at_least("keys", shape.keys, 1).density(density);
  add_shape(check, shape.head_dim, shape.tile);
  check.raise();
}

struct Reals {
  double n, d, t;
};

Reals reals(const Shape& shape) {
  return {static_cast<double>(shape.keys), static_cast<double>(shape.head_dim), static_cast<double>(shape.tile)};
}

// Coefficient of n^2 / T in the traffic of an N:M attention: (57 d + 25 T) / 16 for 2:4 and 1:2.
double nm_per_tile(Pattern pattern, double d, double t, int element_bits) {
  const double share = static_cast<double>(pattern.keep) / pattern.group;
  const double metadata = metadata_fraction(pattern, element_bits);
  return d * (3.0 + share + metadata) + t * (3.0 * share + metadata);
}

}  // namespace

double metadata_fraction(Pattern pattern, int element_bits) {
  Check check("metadata_fraction");
  check.pattern(pattern).at_least("element_bits", element_bits, 1).raise();
  if (pattern.is_dense()) return 0.0;
  // 1:2 is stored in the codes of 2:4 (one 4-bit code per 8 bytes), whatever one index bit would take.
  if (pattern == Pattern{1, 2}) return 1.0 / 16.0;
  const auto index_bits = static_cast<int>(std::bit_width(static_cast<unsigned>(pattern.group - 1)));
  return static_cast<double>(pattern.keep * index_bits) / (static_cast<double>(pattern.group) * element_bits);
}

double weight_memory_ratio(Pattern pattern, int element_bits) {
  const double metadata = metadata_fraction(pattern, element_bits);
  return static_cast<double>(pattern.keep) / pattern.group + metadata;
}

Traffic full_traffic(const Shape& shape) {
  check_shape("full_traffic", shape);
  const auto [n, d, t] = reals(shape);
  return {.scores = n * n * (2.0 * d / t + 1.0), .softmax = 2.0 * n * n, .values = n * d * (2.0 * n / t + 1.0)};
}

Traffic topk_traffic(const Shape& shape, double density) {
  check_shape("topk_traffic", shape, density);
  const auto [n, d, t] = reals(shape);
  return {.scores = n * n * (2.0 * d / t + 1.0),
          .softmax = 2.0 * n * n * density,
          .values = n * d * (density * n + density * n / t + 1.0)};
}

Traffic fixed_traffic(const Shape& shape, double density, FixedReads reads) {
  check_shape("fixed_traffic", shape, density);
  const auto [n, d, t] = reals(shape);
  const double value_share = reads == FixedReads::all_values ? 1.0 : density;
  return {.scores = density * n * n * (2.0 * d / t + 1.0),
          .softmax = 2.0 * n * n * density,
          .values = n * d * ((value_share + density) * n / t + 1.0)};
}

Traffic nm_traffic(const Shape& shape, Pattern pattern, int element_bits) {
  check_shape("nm_traffic", shape);
  const double metadata = metadata_fraction(pattern, element_bits);
  const double share = static_cast<double>(pattern.keep) / pattern.group;
  const auto [n, d, t] = reals(shape);
  return {.scores = n * n * (2.0 * d / t + share + metadata),
          .softmax = 2.0 * n * n * share,
          .values = n * d * (n / t * (1.0 + share + metadata) + 1.0)};
}

double topk_speedup_bound(std::int64_t head_dim, std::int64_t tile, double density) {
  check_shape("topk_speedup_bound", {1, head_dim, tile}, density);
  const auto [n, d, t] = reals({1, head_dim, tile});
  return (4.0 * d + 3.0 * t) / (2.0 * d + t + (d + 2.0 * t + d * t) * density);
}

double fixed_speedup(std::int64_t head_dim, std::int64_t tile, double density, FixedReads reads) {
  check_shape("fixed_speedup", {1, head_dim, tile}, density);
  if (reads == FixedReads::kept_values) return 1.0 / density;
  const auto [n, d, t] = reals({1, head_dim, tile});
  return (4.0 * d + 3.0 * t) / ((1.0 + 3.0 * density) * d + 3.0 * density * t);
}

double nm_speedup(Pattern pattern, std::int64_t head_dim, std::int64_t tile, int element_bits) {
  check_shape("nm_speedup", {1, head_dim, tile});
  const auto [n, d, t] = reals({1, head_dim, tile});
  return (4.0 * d + 3.0 * t) / nm_per_tile(pattern, d, t, element_bits);
}

double topk_density_to_win(std::int64_t head_dim, std::int64_t tile) {
  check_shape("topk_density_to_win", {1, head_dim, tile});
  const auto [n, d, t] = reals({1, head_dim, tile});
  return (2.0 * d + 2.0 * t) / (d + 2.0 * t + d * t);
}

double topk_density_matching_nm(Pattern pattern, std::int64_t head_dim, std::int64_t tile, int element_bits) {
  check_shape("topk_density_matching_nm", {1, head_dim, tile});
  const auto [n, d, t] = reals({1, head_dim, tile});
  return (nm_per_tile(pattern, d, t, element_bits) - 2.0 * d - t) / (d + 2.0 * t + d * t);
}

double fixed_density_matching_nm(Pattern pattern, std::int64_t head_dim, std::int64_t tile, FixedReads reads,
                                 int element_bits) {
  check_shape("fixed_density_matching_nm", {1, head_dim, tile});
  const auto [n, d, t] = reals({1, head_dim, tile});
  const double per_tile = nm_per_tile(pattern, d, t, element_bits);
  return reads == FixedReads::kept_values ? per_tile / (4.0 * d + 3.0 * t) : (per_tile - d) / (3.0 * d + 3.0 * t);
}

double fixed_density_matching_nm_as_printed(std::int64_t head_dim, std::int64_t tile) {
  check_shape("fixed_density_matching_nm_as_printed", {1, head_dim, tile});
  const auto [n, d, t] = reals({1, head_dim, tile});
  return (4.0 * d + 3.0 * t) * (64.0 * d + 48.0 * t) / ((57.0 * d + 25.0 * t) * (3.0 * d + 3.0 * t)) -
         d / (3.0 * d + 3.0 * t);
}

}  // namespace dspattn::theory
