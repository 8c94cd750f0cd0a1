#include "cuda/sm90/fused_tf32/forward.h"

#include <algorithm>

#include "core/geometry.h"
#include "cuda/device.h"
#include "cuda/sm90/fused/tensor_maps.h"
#include "cuda/sm90/fused_tf32/launch.h"
#include "cuda/tile/pair_map.h"

namespace dspattn::cuda::sm90::tf32 {
namespace {

// Completes the parameters for a variant; false when the variant cannot serve them.
bool complete(FusedParams& p, const ForwardArgs& args, const core::Geometry& geometry, Variant variant,
              const Launcher& launcher, int blocks) {
  const Problem& problem = args.problem;
  p.keys = tile::pair_map(problem.grouping, launcher.tile_k);
  p.copy_engine_q = make_rows_map(p.q_map, p.q, extents_of(problem.q), DType::f32, launcher.tile_q, 1);
  // K and V: one key of each pair of a tile.
  p.copy_engine_k =
      make_rows_map(p.k_map, p.k, extents_of(problem.k), DType::f32, launcher.tile_k / 2, p.keys.group_step);
  p.copy_engine_v =
      make_rows_map(p.v_map, p.v, extents_of(problem.v), DType::f32, launcher.tile_k / 2, p.keys.group_step);
  p.order = order_of(p, problem, geometry, launcher.tile_q, blocks);
  return variant == Variant::general || !needs_general(p);
}

// The variant that is faster when both can serve: three warpgroups once they have rows enough for every multiprocessor.
Variant preferred(const FusedRow& row, const core::Geometry& geometry, int multiprocessors) {
  if (!has_wide(row.dim)) return Variant::narrow;
  const std::int64_t items = geometry.batch * geometry.heads * ((geometry.n_q + 191) / 192);
  return items >= 2 * multiprocessors ? Variant::wide : Variant::narrow;
}

}  // namespace

void why_not(const FusedRow& row, const Problem& problem, core::Refusals& refusals) {
  fused_why_not(row, problem, refusals);
  if (problem.fp32_products == Fp32Products::full) {
    refusals.add(
        [] { return std::string("fp32_products: takes tf32_allowed, for its products are tf32's, got full"); });
  }
}

void forward_launch(const FusedRow& row, const ForwardArgs& args) {
  const core::Geometry geometry = core::geometry_of(args.problem);
  if (geometry.batch == 0 || geometry.heads == 0 || geometry.n_q == 0 || geometry.d_v == 0) return;
  const CurrentDevice device(args.problem.device.index);
  const int multiprocessors = device_facts(args.problem.device.index).multiprocessors;
  FusedParams params = params_of(args, geometry);
  for (const Variant variant : {preferred(row, geometry, multiprocessors), Variant::general}) {
    const Launcher launcher = variant == Variant::general ? row.general_launcher(variant) : row.launcher(variant);
    if (launcher.launch == nullptr) continue;
    const std::int64_t items =
        geometry.batch * geometry.heads * ((geometry.n_q + launcher.tile_q - 1) / launcher.tile_q);
    const int blocks = static_cast<int>(std::min<std::int64_t>(items, multiprocessors));
    if (!complete(params, args, geometry, variant, launcher, blocks)) continue;
    check(launcher.launch(params, blocks, static_cast<cudaStream_t>(args.run.stream)),
          "launching the fused tf32 kernel");
    return;
  }
}

}  // namespace dspattn::cuda::sm90::tf32
