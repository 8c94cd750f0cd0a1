// N:M inside Nystromformer, Linformer and block sparsity: formulas against the tile walk.
#include <gtest/gtest.h>

#include "dspattn/theory.h"
#include "dspattn/theory_monte_carlo.h"

namespace dspattn::theory {
namespace {

constexpr NystromShape kNystrom{.keys = 1024, .head_dim = 64, .tile = 64, .landmarks = 128};
constexpr LinformerShape kLinformer{.keys = 1024, .head_dim = 64, .tile = 64, .projected = 256};

TEST(Combined, TrafficEqualsTheCountOnWholeTiles) {
  for (const Pattern pattern : {Pattern::dense(), Pattern{1, 2}, Pattern{2, 4}, Pattern{4, 8}}) {
    const Traffic nystrom = nystrom_traffic(kNystrom, pattern);
    const Traffic nystrom_counted = count_nystrom_traffic(kNystrom, pattern);
    EXPECT_DOUBLE_EQ(nystrom.scores, nystrom_counted.scores);
    EXPECT_DOUBLE_EQ(nystrom.softmax, nystrom_counted.softmax);
    EXPECT_DOUBLE_EQ(nystrom.values, nystrom_counted.values);
    EXPECT_DOUBLE_EQ(nystrom.other, nystrom_counted.other);
    const Traffic linformer = linformer_traffic(kLinformer, pattern);
    const Traffic linformer_counted = count_linformer_traffic(kLinformer, pattern);
    EXPECT_DOUBLE_EQ(linformer.total(), linformer_counted.total());
    EXPECT_DOUBLE_EQ(linformer.other, linformer_counted.other);
  }
}

TEST(Combined, NystromFormulasEqualAProductMultipliedOut) {
  constexpr NystromShape kSmall{.keys = 96, .head_dim = 12, .tile = 64, .landmarks = 24};
  for (const Pattern pattern : {Pattern::dense(), Pattern{1, 2}, Pattern{2, 4}, Pattern{1, 4}, Pattern{4, 8}}) {
    const NystromCount counted = count_nystrom(kSmall, pattern);
    EXPECT_DOUBLE_EQ(nystrom_products(kSmall, pattern), static_cast<double>(counted.products));
    EXPECT_DOUBLE_EQ(nystrom_memory(kSmall, pattern), static_cast<double>(counted.stored_values));
  }
}

TEST(Combined, NystromCountsArethePapers) {
  const double n = 1024, d = 64, m = 128;
  EXPECT_DOUBLE_EQ(nystrom_products(kNystrom, Pattern::dense()), n * m * m + m * n * d + m * m * m + n * m * d);
  EXPECT_DOUBLE_EQ(nystrom_products(kNystrom, {2, 4}), n * m * m / 2 + n * m * d / 2 + m * m * m + n * m * d);
  EXPECT_DOUBLE_EQ(nystrom_memory(kNystrom, Pattern::dense()), m * d + n * m + m * m + n * m + n * d);
  EXPECT_DOUBLE_EQ(nystrom_memory(kNystrom, {2, 4}), m * d + n * m + m * m + n * d);
}

TEST(Combined, PruningAlwaysMovesLess) {
  EXPECT_LT(nystrom_traffic(kNystrom, {2, 4}).total(), nystrom_traffic(kNystrom, Pattern::dense()).total());
  EXPECT_LT(linformer_traffic(kLinformer, {2, 4}).total(), linformer_traffic(kLinformer, Pattern::dense()).total());
}

// A quarter of the blocks in rows of unequal length, one of them empty; every extent a multiple of the tile.
TEST(Combined, BlockSparsityEqualsTheCountOfItsBlocks) {
  const Shape shape{.keys = 512, .head_dim = 128, .tile = 64};
  bool kept[64] = {};
  for (const int block : {0, 1, 2, 3, 4, 5, 6, 9, 18, 27, 34, 36, 45, 54, 55, 63}) kept[block] = true;
  for (const Pattern pattern : {Pattern::dense(), Pattern{1, 2}, Pattern{2, 4}}) {
    for (const int bits : {16, 32}) {
      const Traffic formula = block_sparse_traffic(shape, 0.25, pattern, bits);
      const Traffic counted = count_block_sparse_traffic(shape, kept, pattern, bits);
      EXPECT_DOUBLE_EQ(formula.scores, counted.scores);
      EXPECT_DOUBLE_EQ(formula.softmax, counted.softmax);
      EXPECT_DOUBLE_EQ(formula.values, counted.values);
    }
  }
}

TEST(Combined, BlockSparsityIsFixedSparsityTimesThePattern) {
  const Shape shape{.keys = 1024, .head_dim = 64, .tile = 64};
  EXPECT_DOUBLE_EQ(block_sparse_traffic(shape, 0.25, Pattern::dense()).total(),
                   fixed_traffic(shape, 0.25, FixedReads::kept_values).total());
  EXPECT_DOUBLE_EQ(block_sparse_traffic(shape, 1.0, {2, 4}).total(), nm_traffic(shape, {2, 4}).total());
}

}  // namespace
}  // namespace dspattn::theory
