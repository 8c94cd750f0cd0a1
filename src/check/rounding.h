// Bounds on what rounding may do to a result of fp32 arithmetic.
//
// A sum of n terms in any order errs by at most about n*u relative to the sum of magnitudes; with independent roundings
// by c*sqrt(n)*u with probability 1 - 2 exp(-c^2/2) (Higham and Mary 2019). c = 6 makes that 3e-8. u = 2^-24 for fp32,
// and 2^-11 for products in tf32.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "dspattn/attention.h"

namespace dspattn::check {

inline constexpr double kUnitF32 = 0x1p-24;
inline constexpr double kUnitTf32 = 0x1p-11;

// Relative to the sum of magnitudes: a sum of `terms` products and a few further operations.
inline double sum_error(std::int64_t terms, double unit = kUnitF32) {
  const double n = static_cast<double>(std::max<std::int64_t>(terms, 1));
  return unit * (std::min(n, 6.0 * std::sqrt(n)) + 4.0);
}

// The unit of the products of fp32 inputs.
inline double product_unit(const Problem& device_problem) {
  const bool tf32 = device_problem.q.dtype == DType::f32 && device_problem.device.type == DeviceType::cuda &&
                    device_problem.fp32_products == Fp32Products::tf32_allowed;
  return tf32 ? kUnitTf32 : kUnitF32;
}

}  // namespace dspattn::check
