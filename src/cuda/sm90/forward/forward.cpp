#include "cuda/sm90/forward/forward.h"

#include <algorithm>

#include "cuda/blocks/tensor_maps.h"
#include "cuda/device/device.h"
#include "cuda/tile/head_dims.h"

namespace dspattn::cuda::sm90 {

namespace {

// The kernel whose row serves a problem.
ForwardKernel kernel_for(const Problem& problem) {
  const std::int64_t larger = std::max(problem.q.extent(3), problem.v.extent(3));
  int dim = 0;
  for (const int other : tile::kHeadDims) dim = other >= larger && (dim == 0 || other < dim) ? other : dim;
  return {problem.q.dtype, problem.pattern.group == 4 ? Selection::two_of_four : Selection::one_of_two, dim};
}

}  // namespace

std::size_t fused_workspace(const ForwardArgs& args) {
  const Problem& problem = args.problem;
  if (problem.rest == Rest::drop) return schedule_bytes({problem, args.out});
  if (is_empty(core::geometry_of(problem))) return 0;
  return plan_forward(kernel_for(problem), problem, args.out, device_facts(problem.device.index)).workspace_bytes;
}

std::string describe_plan(const ForwardKernel& kernel, const Problem& problem) {
  if (is_empty(core::geometry_of(problem))) return {};
  return to_string(plan_forward(kernel, problem, contiguous_out(problem), device_facts(problem.device.index)));
}

void fused_forward_launch(const ForwardKernel& kernel, Launcher (*launcher)(Variant),
                          Launcher (*general_launcher)(Variant), const ForwardArgs& args, const MeanLaunchers& mean) {
  const Problem& problem = args.problem;
  const CurrentDevice device(problem.device.index);
  if (is_empty(core::geometry_of(problem))) return clear_packed(args);
  const ForwardPlan plan = plan_forward(kernel, problem, args.out, device_facts(problem.device.index));
  ForwardParams params = params_of(args, plan);
  const int tile_k = plan.traits.tile_k;
  params.keys = tile::key_map(pattern_of(kernel.selection), problem.grouping, tile_k);
  if (plan.tma_k) {
    make_map(params.k_map, k_shape(params.k, extents_of(problem.k), kernel.type, params.keys, tile_k), kernel.type);
  }
  if (plan.tma_v) {
    make_map(params.v_map, v_shape(params.v, extents_of(problem.v), kernel.type, params.keys, tile_k), kernel.type);
  }
  prepare(args, plan, params, schedule_entries({problem, args.out}));
  if (plan.means.present) {
    launcher = mean.launcher;
    general_launcher = mean.general_launcher;
  }
  const Launcher launch = (plan.variant == Variant::general ? general_launcher : launcher)(plan.variant);
  launch(params, plan, static_cast<cudaStream_t>(args.run.stream));
}

}  // namespace dspattn::cuda::sm90
