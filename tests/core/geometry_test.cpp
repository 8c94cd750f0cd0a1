// Sizes and scales at the ends of their ranges.
#include "core/geometry.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "core/pipeline_check.h"
#include "dspattn/pipeline.h"

namespace dspattn::core {
namespace {

TEST(Geometry, BoundsOfPackedLengthsNeverExceedTheRows) {
  Problem problem;
  problem.q = {nullptr, DType::f32, {1, 2, 7, 8}};
  problem.k = {nullptr, DType::f32, {1, 2, 9, 8}};
  problem.v = problem.k;
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  problem.packed = Packed{{nullptr, DType::i32, {3}}, {nullptr, DType::i32, {3}}, kHuge, kHuge};
  EXPECT_EQ(geometry_of(problem).n_q, 7);
  EXPECT_EQ(geometry_of(problem).n_k, 9);
  problem.packed->max_q = 5;
  problem.packed->max_k = 4;
  EXPECT_EQ(geometry_of(problem).n_q, 5);
  EXPECT_EQ(geometry_of(problem).n_k, 4);
}

TEST(SelectionScale, IsTheLargestPowerOfTwoNotAboveTheScale) {
  for (int exponent = -126; exponent <= 126; ++exponent) {
    const double power = std::ldexp(1.0, exponent);
    EXPECT_EQ(selection_scale(power), power);
    EXPECT_EQ(selection_scale(std::nextafter(power, 1e300)), power);
    EXPECT_EQ(selection_scale(std::nextafter(power, 0.0)), power / 2) << exponent;
  }
}

TEST(SelectionScale, FitsATypeThatHoldsItAsANormalNumber) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double scale : {kLeastScale, 2e-8, 0.125, 1e5, kLargestScale}) {
      EXPECT_TRUE(selection_scale_fits(dtype, scale)) << name(dtype) << scale;
    }
  }
  for (const double scale : {0x1p-14, 0.125, 1.0, 65535.0}) EXPECT_TRUE(selection_scale_fits(DType::f16, scale));
  for (const double scale : {kLeastScale, 2e-8, 0x1.fp-15, 65536.0, 1e5, kLargestScale}) {
    EXPECT_FALSE(selection_scale_fits(DType::f16, scale)) << scale;
  }
}

TEST(SparseShape, SizesThatDoNotFitAreRefused) {
  constexpr std::int64_t kMany = std::int64_t{1} << 33;
  const SparseShape wide{DType::bf16, {2, 4}, Grouping::consecutive, kMany, kMany, 1, 4};
  EXPECT_THROW(static_cast<void>(wide.matrices()), Error);
  EXPECT_THROW(static_cast<void>(wide.nonzeros_bytes()), Error);
  EXPECT_THROW(static_cast<void>(wide.metadata_bytes()), Error);
  const SparseShape long_rows{DType::bf16, {2, 4}, Grouping::consecutive, 1 << 20, 1, 1 << 30, 1 << 30};
  EXPECT_EQ(long_rows.matrices(), 1 << 20);
  EXPECT_THROW(static_cast<void>(long_rows.nonzeros_bytes()), Error);
  SoftmaxArgs args;
  args.matrices.shape = wide;
  const std::vector<std::string> reasons = softmax_reasons(args);
  ASSERT_EQ(reasons.size(), 1u);
  EXPECT_NE(reasons.front().find("matrices.shape: expected sparse matrices whose size fits in 63 bits"),
            std::string::npos)
      << reasons.front();
}

}  // namespace
}  // namespace dspattn::core
