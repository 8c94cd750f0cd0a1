#include "cuda/sm90/forward_tf32/forward.h"

#include "cuda/blocks/tensor_maps.h"
#include "cuda/device/device.h"
#include "cuda/sm90/forward_tf32/plan.h"
#include "cuda/tile/pair_map.h"

namespace dspattn::cuda::sm90::tf32 {

void why_not(const FusedRow& row, const Problem& problem, core::Refusals& refusals) {
  fused_why_not(row, problem, refusals);
  if (problem.fp32_products == Fp32Products::full) {
    refusals.add(
        [] { return std::string("fp32_products: takes tf32_allowed, for its products are tf32's, got full"); });
  }
}

std::string describe_plan(int dim, const Problem& problem) {
  if (is_empty(core::geometry_of(problem))) return {};
  return to_string(plan_forward(dim, problem, contiguous_out(problem), device_facts(problem.device.index)));
}

void forward_launch(int dim, Launcher (*launcher)(Variant), Launcher (*general_launcher)(Variant),
                    const ForwardArgs& args) {
  const Problem& problem = args.problem;
  const CurrentDevice device(problem.device.index);
  if (is_empty(core::geometry_of(problem))) return clear_packed(args);
  const ForwardPlan plan = plan_forward(dim, problem, args.out, device_facts(problem.device.index));
  ForwardParams params = params_of(args, plan);
  params.keys = tile::pair_map(problem.grouping, plan.traits.tile_k);
  // One key of each pair of a tile.
  const auto shape = [&](const RowsView& rows, const ConstTensorView& tensor) {
    return rows_shape(rows, extents_of(tensor), DType::f32, plan.traits.tile_k / 2, params.keys.group_step);
  };
  if (plan.tma_k) make_map(params.k_map, shape(params.k, problem.k), DType::f32);
  if (plan.tma_v) make_map(params.v_map, shape(params.v, problem.v), DType::f32);
  prepare(args, plan, params, 0);
  const Launcher launch = (plan.variant == Variant::general ? general_launcher : launcher)(plan.variant);
  launch(params, plan, static_cast<cudaStream_t>(args.run.stream));
}

}  // namespace dspattn::cuda::sm90::tf32
