// Traffic by counting: every product is walked tile by tile and each load and store is added up.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dspattn/theory_monte_carlo.h"
#include "theory/check.h"

namespace dspattn::theory {
namespace {

// A matrix as stored. Pruned: per group of `group` entries `keep` values and a code of `code_bits` bits.
struct Stored {
  int keep = 1;
  int group = 1;
  int code_bits = 0;
  int element_bits = 16;

  // Elements moved when `entries` consecutive entries of a row are.
  double moved(std::int64_t entries) const {
    const double groups = static_cast<double>(entries) / group;
    return groups * keep + groups * code_bits / element_bits;
  }
  double values(std::int64_t entries) const { return static_cast<double>(entries) / group * keep; }
};

Stored stored(Pattern pattern, int element_bits) {
  if (pattern.is_dense()) return {};
  if (pattern == Pattern{1, 2}) {  // the hardware's 4-bit code covers 8 bytes: one fp32 pair, two 16-bit pairs
    return {1, 2, element_bits == 32 ? 4 : 2, element_bits == 32 ? 32 : 16};
  }
  int bits = 0;
  while ((1 << bits) < pattern.group) ++bits;
  return {pattern.keep, pattern.group, pattern.keep * bits, element_bits};
}

// (rows x inner)(inner x cols), output in tile x tile pieces, operands loaded in steps of `tile` along the inner side.
double walk_product(std::int64_t rows, std::int64_t cols, std::int64_t inner, std::int64_t tile, Stored left,
                    Stored result) {
  double moved = 0.0;
  for (std::int64_t i = 0; i < rows; i += tile) {
    const std::int64_t height = std::min(tile, rows - i);
    for (std::int64_t j = 0; j < cols; j += tile) {
      const std::int64_t width = std::min(tile, cols - j);
      for (std::int64_t c = 0; c < inner; c += tile) {
        const std::int64_t depth = std::min(tile, inner - c);
        moved += static_cast<double>(height) * left.moved(depth);
        moved += static_cast<double>(depth * width);
      }
      moved += static_cast<double>(height) * result.moved(width);
    }
  }
  return moved;
}

// A matrix of which only some entries are stored: per row the columns.
using StoredRows = std::vector<std::vector<std::int64_t>>;

// `keep` of every `group` columns; which ones does not matter to a count, but they differ from row to row.
StoredRows nonzeros(std::int64_t rows, std::int64_t cols, Pattern pattern) {
  StoredRows matrix(static_cast<std::size_t>(rows));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < cols; ++column) {
      const bool kept = (column + row) % pattern.group < pattern.keep;
      if (kept) matrix[static_cast<std::size_t>(row)].push_back(column);
    }
  }
  return matrix;
}

std::int64_t stored_count(const StoredRows& matrix) {
  std::int64_t count = 0;
  for (const auto& row : matrix) count += static_cast<std::int64_t>(row.size());
  return count;
}

// The product of two such matrices, entry by entry: how often it multiplies, and which entries it has.
std::pair<std::int64_t, StoredRows> multiply(const StoredRows& left, const StoredRows& right, std::int64_t cols) {
  std::int64_t products = 0;
  StoredRows result(left.size());
  for (std::size_t row = 0; row < left.size(); ++row) {
    std::vector<bool> touched(static_cast<std::size_t>(cols), false);
    for (const std::int64_t inner : left[row]) {
      for (const std::int64_t column : right[static_cast<std::size_t>(inner)]) {
        ++products;
        touched[static_cast<std::size_t>(column)] = true;
      }
    }
    for (std::int64_t column = 0; column < cols; ++column) {
      if (touched[static_cast<std::size_t>(column)]) result[row].push_back(column);
    }
  }
  return {products, std::move(result)};
}

// Reads `in` elements of each row and writes `out`.
double walk_rows(std::int64_t rows, double in, double out) {
  double moved = 0.0;
  for (std::int64_t i = 0; i < rows; ++i) moved += in + out;
  return moved;
}

void check_shape(const char* function, std::int64_t keys, std::int64_t head_dim, std::int64_t tile) {
  Check(function).at_least("keys", keys, 1).at_least("head_dim", head_dim, 1).at_least("tile", tile, 1).raise();
}

}  // namespace

Traffic count_full_traffic(const Shape& shape) {
  check_shape("count_full_traffic", shape.keys, shape.head_dim, shape.tile);
  const std::int64_t n = shape.keys;
  return {.scores = walk_product(n, n, shape.head_dim, shape.tile, {}, {}),
          .softmax = walk_rows(n, static_cast<double>(n), static_cast<double>(n)),
          .values = walk_product(n, shape.head_dim, n, shape.tile, {}, {})};
}

Traffic count_topk_traffic(const Shape& shape, std::int64_t kept_per_row) {
  check_shape("count_topk_traffic", shape.keys, shape.head_dim, shape.tile);
  const std::int64_t n = shape.keys;
  const auto kept = static_cast<double>(kept_per_row);
  double values = 0.0;
  for (std::int64_t row = 0; row < n; ++row) {  // output pieces of 1 x tile: no two rows share what they gather
    for (std::int64_t j = 0; j < shape.head_dim; j += shape.tile) {
      const auto width = static_cast<double>(std::min(shape.tile, shape.head_dim - j));
      values += kept + kept * width + width;
    }
  }
  return {.scores = walk_product(n, n, shape.head_dim, shape.tile, {}, {}),
          .softmax = walk_rows(n, kept, kept),
          .values = values};
}

Traffic count_fixed_traffic(const Shape& shape, std::int64_t kept_columns, FixedReads reads) {
  check_shape("count_fixed_traffic", shape.keys, shape.head_dim, shape.tile);
  const std::int64_t n = shape.keys;
  double values = 0.0;
  for (std::int64_t i = 0; i < n; i += shape.tile) {
    const std::int64_t height = std::min(shape.tile, n - i);
    for (std::int64_t j = 0; j < shape.head_dim; j += shape.tile) {
      const std::int64_t width = std::min(shape.tile, shape.head_dim - j);
      values += static_cast<double>(height * kept_columns);                                         // weights
      values += static_cast<double>(width * (reads == FixedReads::all_values ? n : kept_columns));  // V
      values += static_cast<double>(height * width);
    }
  }
  const auto kept = static_cast<double>(kept_columns);
  return {.scores = walk_product(n, kept_columns, shape.head_dim, shape.tile, {}, {}),
          .softmax = walk_rows(n, kept, kept),
          .values = values};
}

Traffic count_nm_traffic(const Shape& shape, Pattern pattern, int element_bits) {
  Check("count_nm_traffic").pattern(pattern).raise();
  check_shape("count_nm_traffic", shape.keys, shape.head_dim, shape.tile);
  const Stored pruned = stored(pattern, element_bits);
  const std::int64_t n = shape.keys;
  return {.scores = walk_product(n, n, shape.head_dim, shape.tile, {}, pruned),
          .softmax = walk_rows(n, pruned.values(n), pruned.values(n)),
          .values = walk_product(n, shape.head_dim, n, shape.tile, pruned, {})};
}

Traffic count_performer_traffic(const Shape& shape, std::int64_t features) {
  check_shape("count_performer_traffic", shape.keys, shape.head_dim, shape.tile);
  Check("count_performer_traffic").at_least("features", features, 1).raise();
  const std::int64_t n = shape.keys;
  const auto d = static_cast<double>(shape.head_dim);
  const auto m = static_cast<double>(features);
  double maps = 0.0;
  for (int side = 0; side < 2; ++side) {                                    // queries, then keys
    maps += walk_product(n, features, shape.head_dim, shape.tile, {}, {});  // T1, T4
    maps += walk_rows(n, d, 1.0) + walk_rows(n, m, 1.0);                    // row norms, row maxima
    maps += walk_rows(n, m + 2.0, m);                                       // exp(T1 - T2 - T3)
  }
  double normaliser = walk_rows(n, m, 0.0) + m;       // T7: column sums of phi(K)
  for (std::int64_t i = 0; i < n; i += shape.tile) {  // T8: phi(Q) T7
    const auto height = static_cast<double>(std::min(shape.tile, n - i));
    normaliser += height * m + m + height;
  }
  const double products = walk_product(features, shape.head_dim, n, shape.tile, {}, {}) +
                          walk_product(n, shape.head_dim, features, shape.tile, {}, {}) + static_cast<double>(n);
  return {.values = products, .other = maps + normaliser};
}

Traffic count_nystrom_traffic(const NystromShape& shape, Pattern pattern, int element_bits) {
  Check("count_nystrom_traffic").pattern(pattern).at_least("landmarks", shape.landmarks, 1).raise();
  check_shape("count_nystrom_traffic", shape.keys, shape.head_dim, shape.tile);
  const Stored pruned = stored(pattern, element_bits);
  const std::int64_t n = shape.keys;
  const std::int64_t d = shape.head_dim;
  const std::int64_t m = shape.landmarks;
  const std::int64_t t = shape.tile;
  double inverse = 0.0;
  for (int step = 0; step < 4 * shape.pseudo_inverse_iterations; ++step) inverse += walk_product(m, m, m, t, {}, {});
  const auto size = static_cast<double>(m);
  return {
      .scores = walk_product(n, m, d, t, {}, pruned) + walk_product(m, n, d, t, {}, pruned) +
                walk_product(m, m, d, t, {}, {}),
      .softmax = walk_rows(n, pruned.values(m), pruned.values(m)) + walk_rows(m, pruned.values(n), pruned.values(n)) +
                 walk_rows(m, size, size),
      .values = walk_product(m, d, n, t, pruned, {}) + walk_product(n, m, m, t, pruned, {}) +
                walk_product(n, d, m, t, {}, {}),
      .other = 2.0 * (walk_rows(n, static_cast<double>(d), 0.0) + walk_rows(m, 0.0, static_cast<double>(d))) + inverse};
}

Traffic count_linformer_traffic(const LinformerShape& shape, Pattern pattern, int element_bits) {
  Check("count_linformer_traffic").pattern(pattern).at_least("projected", shape.projected, 1).raise();
  check_shape("count_linformer_traffic", shape.keys, shape.head_dim, shape.tile);
  const Stored pruned = stored(pattern, element_bits);
  const std::int64_t n = shape.keys;
  const std::int64_t d = shape.head_dim;
  const std::int64_t k = shape.projected;
  return {.scores = walk_product(n, k, d, shape.tile, {}, pruned),
          .softmax = walk_rows(n, pruned.values(k), pruned.values(k)),
          .values = walk_product(n, d, k, shape.tile, pruned, {}),
          .other = walk_product(k, d, n, shape.tile, pruned, {}) + walk_product(k, d, n, shape.tile, pruned, {})};
}

Traffic count_block_sparse_traffic(const Shape& shape, std::span<const bool> kept, Pattern pattern, int element_bits) {
  check_shape("count_block_sparse_traffic", shape.keys, shape.head_dim, shape.tile);
  const std::int64_t blocks = shape.keys / shape.tile;
  Check check("count_block_sparse_traffic");
  check.pattern(pattern);
  check.require(shape.keys % shape.tile == 0, "keys", "a multiple of the tile", std::to_string(shape.keys));
  check.require(static_cast<std::int64_t>(kept.size()) == blocks * blocks, "kept",
                std::to_string(blocks * blocks) + " blocks", std::to_string(kept.size()));
  check.raise();
  const Stored pruned = stored(pattern, element_bits);
  const std::int64_t t = shape.tile;
  Traffic total;
  for (std::int64_t row = 0; row < blocks; ++row) {
    std::int64_t seen = 0;
    for (std::int64_t column = 0; column < blocks; ++column) {
      if (!kept[static_cast<std::size_t>(row * blocks + column)]) continue;
      ++seen;
      total.scores += walk_product(t, t, shape.head_dim, t, {}, pruned);
    }
    total.softmax += walk_rows(t, pruned.values(seen * t), pruned.values(seen * t));
    total.values += walk_product(t, shape.head_dim, seen * t, t, pruned, {});
  }
  return total;
}

NystromCount count_nystrom(const NystromShape& shape, Pattern pattern) {
  Check check("count_nystrom");
  check.pattern(pattern).at_least("landmarks", shape.landmarks, 1).at_least("keys", shape.keys, 1);
  check.at_least("head_dim", shape.head_dim, 1);
  check.require(shape.keys % pattern.group == 0, "keys", "a multiple of the group", std::to_string(shape.keys));
  check.require(shape.landmarks % pattern.group == 0, "landmarks", "a multiple of the group",
                std::to_string(shape.landmarks));
  check.raise();
  const std::int64_t n = shape.keys, m = shape.landmarks, d = shape.head_dim;
  const StoredRows f = nonzeros(n, m, pattern), b = nonzeros(m, n, pattern);
  const StoredRows square = nonzeros(m, m, Pattern::dense()), v = nonzeros(n, d, Pattern::dense());
  const auto [of_f, f_inverse] = multiply(f, square, m);
  const auto [of_b, few_values] = multiply(b, v, d);
  const auto [of_both, out] = multiply(f_inverse, few_values, d);
  const std::int64_t of_inverse = multiply(square, square, m).first;  // one step of the pseudo-inverse
  const std::int64_t landmarks = stored_count(nonzeros(m, d, Pattern::dense()));
  return {.products = of_f + of_b + of_both + of_inverse,
          .stored_values = landmarks + stored_count(f) + stored_count(b) + stored_count(square) + stored_count(out)};
}

}  // namespace dspattn::theory
