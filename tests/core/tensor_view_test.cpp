#include "dspattn/tensor_view.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

#include "core/tensor_checks.h"

namespace dspattn {
namespace {

template <typename Make>
std::string message_of(Make make) {
  try {
    make();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(TensorView, TakesUpToFourExtents) {
  const float x = 0;
  const ConstTensorView view(&x, DType::f32, {2, 3, 4, 5});
  EXPECT_EQ(view.rank, 4);
  EXPECT_EQ(view.stride, (std::array<std::int64_t, 4>{60, 20, 5, 1}));
  EXPECT_EQ(message_of([&] {
              ConstTensorView(&x, DType::f32, {1, 2, 3, 4, 5});
            }),
            "tensor view extents: expected at most 4, got 5");
}

TEST(TensorView, TakesAStrideForEachExtent) {
  const float x = 0;
  const ConstTensorView view(&x, DType::f32, {2, 3}, {7, 2});
  EXPECT_EQ(view.step(0), 7);
  EXPECT_EQ(view.step(1), 2);
  EXPECT_EQ(message_of([&] {
              ConstTensorView(&x, DType::f32, {2, 3, 4}, {12});
            }),
            "tensor view strides: expected 3, one for each extent, got 1");
  EXPECT_EQ(message_of([&] {
              ConstTensorView(&x, DType::f32, {2}, {1, 1});
            }),
            "tensor view strides: expected 1, one for each extent, got 2");
}

TEST(TensorView, ExtentsBeyondMemoryAreRefusedByValidation) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const float x = 0;
  core::Report report;
  core::check_input(report, "q", {&x, DType::f32, {kHuge, kHuge, kHuge, kHuge}}, "[...]", 4, core::Inner::any);
  ASSERT_FALSE(report.reasons.empty());
  EXPECT_EQ(report.reasons.front().substr(0, 2), "q:");
}

}  // namespace
}  // namespace dspattn
