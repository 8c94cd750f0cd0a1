// N:M inside mechanisms that are themselves cheaper than full attention: Nystromformer, Linformer, block sparsity.
#include <cmath>

#include "dspattn/theory.h"
#include "theory/check.h"

namespace dspattn::theory {
namespace {

// How a matrix is stored: the share of its entries that remain, and metadata per dense entry.
struct Storage {
  double share = 1.0;
  double metadata = 0.0;
  double stored() const { return share + metadata; }
};

Storage storage(Pattern pattern, int element_bits) {
  return {static_cast<double>(pattern.keep) / pattern.group, metadata_fraction(pattern, element_bits)};
}

// Traffic of (rows x inner)(inner x cols) in T x T tiles. The left operand or the result may be stored sparse.
double product_traffic(double rows, double cols, double inner, double tile, Storage left, Storage result) {
  return rows * cols * (inner / tile * (left.stored() + 1.0) + result.stored());
}

constexpr Storage kDense{};

}  // namespace

double nystrom_products(const NystromShape& shape, Pattern pattern) {
  Check check("nystrom_products");
  check.at_least("keys", shape.keys, 1).at_least("head_dim", shape.head_dim, 1);
  check.at_least("landmarks", shape.landmarks, 1).pattern(pattern).raise();
  const auto n = static_cast<double>(shape.keys);
  const auto d = static_cast<double>(shape.head_dim);
  const auto m = static_cast<double>(shape.landmarks);
  const double share = storage(pattern, 16).share;
  return share * n * m * m + share * n * m * d + m * m * m + n * m * d;
}

double nystrom_memory(const NystromShape& shape, Pattern pattern) {
  Check check("nystrom_memory");
  check.at_least("keys", shape.keys, 1).at_least("head_dim", shape.head_dim, 1);
  check.at_least("landmarks", shape.landmarks, 1).pattern(pattern).raise();
  const auto n = static_cast<double>(shape.keys);
  const auto d = static_cast<double>(shape.head_dim);
  const auto m = static_cast<double>(shape.landmarks);
  const double share = storage(pattern, 16).share;
  return m * d + 2.0 * share * n * m + m * m + n * d;
}

Traffic nystrom_traffic(const NystromShape& shape, Pattern pattern, int element_bits) {
  Check check("nystrom_traffic");
  check.at_least("keys", shape.keys, 1).at_least("head_dim", shape.head_dim, 1).at_least("tile", shape.tile, 1);
  check.at_least("landmarks", shape.landmarks, 1);
  check.at_least("pseudo_inverse_iterations", shape.pseudo_inverse_iterations, 0).raise();
  const Storage pruned = storage(pattern, element_bits);
  const auto n = static_cast<double>(shape.keys);
  const auto d = static_cast<double>(shape.head_dim);
  const auto t = static_cast<double>(shape.tile);
  const auto m = static_cast<double>(shape.landmarks);
  // F = softmax(Q K~^T) is n x m and B = softmax(Q~ K^T) is m x n: both pruned. A = softmax(Q~ K~^T) is m x m.
  const double scores = product_traffic(n, m, d, t, kDense, pruned) + product_traffic(m, n, d, t, kDense, pruned) +
                        product_traffic(m, m, d, t, kDense, kDense);
  const double softmax = 2.0 * 2.0 * n * m * pruned.share + 2.0 * m * m;
  // (F A+)(B V), the order behind the paper's n m^2 term.
  const double values = product_traffic(m, d, n, t, pruned, kDense) + product_traffic(n, m, m, t, pruned, kDense) +
                        product_traffic(n, d, m, t, kDense, kDense);
  const double landmarks = 2.0 * (n * d + m * d);  // segment means of Q and K
  const double inverse = 4.0 * shape.pseudo_inverse_iterations * product_traffic(m, m, m, t, kDense, kDense);
  return {.scores = scores, .softmax = softmax, .values = values, .other = landmarks + inverse};
}

Traffic linformer_traffic(const LinformerShape& shape, Pattern pattern, int element_bits) {
  Check check("linformer_traffic");
  check.at_least("keys", shape.keys, 1).at_least("head_dim", shape.head_dim, 1).at_least("tile", shape.tile, 1);
  check.at_least("projected", shape.projected, 1).raise();
  const Storage pruned = storage(pattern, element_bits);
  const auto n = static_cast<double>(shape.keys);
  const auto d = static_cast<double>(shape.head_dim);
  const auto t = static_cast<double>(shape.tile);
  const auto k = static_cast<double>(shape.projected);
  return {.scores = product_traffic(n, k, d, t, kDense, pruned),
          .softmax = 2.0 * n * k * pruned.share,
          .values = product_traffic(n, d, k, t, pruned, kDense),
          .other = 2.0 * product_traffic(k, d, n, t, pruned, kDense)};
}

Traffic block_sparse_traffic(const Shape& shape, double block_density, Pattern pattern, int element_bits) {
  Check("block_sparse_traffic").density(block_density, "block_density").raise();
  // Only the blocks that remain are computed; inside each, N:M. Tiles of V behind dropped blocks are not read.
  const Traffic blocks = nm_traffic(shape, pattern, element_bits);
  const double output = static_cast<double>(shape.keys) * static_cast<double>(shape.head_dim);
  return {.scores = block_density * blocks.scores,
          .softmax = block_density * blocks.softmax,
          .values = block_density * (blocks.values - output) + output};
}

}  // namespace dspattn::theory
