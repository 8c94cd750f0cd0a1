#include "core/geometry.h"

#include <cmath>

namespace dspattn::core {

Geometry geometry_of(const Problem& problem) {
  Geometry g;
  g.packed = problem.packed.has_value();
  g.batch = g.packed ? problem.packed->cu_q.extent(0) - 1 : problem.q.extent(0);
  g.heads = problem.q.extent(1);
  g.kv_heads = problem.k.extent(1);
  // The bounds that a caller gives for a packed batch may be as large as it likes; sizes are made from these.
  g.n_q = g.packed ? std::min(problem.packed->max_q, problem.q.extent(2)) : problem.q.extent(2);
  g.n_k = g.packed ? std::min(problem.packed->max_k, problem.k.extent(2)) : problem.k.extent(2);
  if (problem.block_table.present()) g.n_k = problem.block_table.extent(1) * problem.k.extent(2);
  g.d = problem.q.extent(3);
  g.d_v = problem.v.extent(3);
  // d = 0 has no 1/sqrt(d); every score is then 0, whatever the scale.
  g.scale = problem.scale.value_or(g.d > 0 ? 1.0 / std::sqrt(static_cast<double>(g.d)) : 1.0);
  return g;
}

Band band_of(const Mask& mask) {
  Band band;
  band.bottom_right = mask.alignment == Alignment::bottom_right;
  band.offset = mask.offset;
  if (mask.window_left) band.left = std::min(*mask.window_left, kUnbounded);
  if (mask.window_right) band.right = std::min(*mask.window_right, kUnbounded);
  if (mask.causal) band.right = std::min<std::int64_t>(band.right, 0);
  return band;
}

double selection_scale(double scale) {
  int exponent = 0;
  std::frexp(scale, &exponent);  // exact, where a logarithm rounds up just below a power of two
  return std::ldexp(1.0, exponent - 1);
}

bool selection_scale_fits(DType dtype, double scale) {
  const double factor = selection_scale(scale);
  return dtype == DType::f16 ? factor >= 0x1p-14 && factor <= 0x1p15 : factor >= kLeastScale && factor <= kLargestScale;
}

}  // namespace dspattn::core
