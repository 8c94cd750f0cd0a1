#include "cuda/sm90/forward/forward.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "cuda/blocks/tensor_maps.h"
#include "cuda/device/device.h"
#include "cuda/tile/head_dims.h"

namespace dspattn::cuda::sm90 {

namespace {

// The kernel whose row serves a problem.
ForwardKernel kernel_for(const Problem& problem) {
  const std::int64_t larger = std::max(problem.q.extent(3), problem.v.extent(3));
  return {problem.q.dtype, problem.pattern.group == 4 ? Selection::two_of_four : Selection::one_of_two,
          tile::head_dim_from(tile::kHeadDims, larger)};
}

// One block of keys of which interleaved groups' first elements alone exist: 32 or 64 keys of 2:4, 64 of 1:2. With a
// bound on elements boxes of K and V end where the tensors do, and threads need not copy the last head's.
bool is_half_block(const Problem& problem, const tile::KeyMap& keys) {
  const std::int64_t n_k = problem.k.extent(2);
  return !problem.packed && keys.pair_step > 1 && n_k > 0 && n_k <= tile::kBlockKeys / 2 && n_k % keys.pair_step == 0;
}
std::optional<TmaShape<5>> bounded(std::optional<TmaShape<5>> shape, std::int64_t n_k, const tile::KeyMap& keys) {
  if (shape) shape->dims[1] = std::min(shape->dims[1], n_k / keys.pair_step);
  return shape;
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
  const bool half_block = is_half_block(problem, params.keys);
  const auto map = [&](CUtensorMap& to, const std::optional<TmaShape<5>>& shape) {
    make_map(to, half_block ? bounded(shape, problem.k.extent(2), params.keys) : shape, kernel.type);
  };
  if (plan.tma_k) map(params.k_map, k_shape(params.k, extents_of(problem.k), kernel.type, params.keys, tile_k));
  if (plan.tma_v) map(params.v_map, v_shape(params.v, extents_of(problem.v), kernel.type, params.keys, tile_k));
  if (half_block) params.last_k = params.last_v = std::numeric_limits<std::int64_t>::max();
  prepare(args, plan, params, schedule_entries({problem, args.out}));
  if (plan.means.present) {
    launcher = mean.launcher;
    general_launcher = mean.general_launcher;
  }
  const Launcher launch = (plan.variant == Variant::general ? general_launcher : launcher)(plan.variant);
  launch(params, plan, static_cast<cudaStream_t>(args.run.stream));
}

}  // namespace dspattn::cuda::sm90
