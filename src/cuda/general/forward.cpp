#include "cuda/general/forward.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>

#include "core/dropout.h"
#include "core/geometry.h"
#include "cuda/blocks/means.h"
#include "cuda/blocks/means_plan.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/blocks/refusals.h"
#include "cuda/blocks/schedule.h"
#include "cuda/device/device.h"
#include "cuda/general/launch.h"
#include "cuda/general/plan.h"
#include "cuda/general/problem.h"

namespace dspattn::cuda::general {
namespace {

WorkParams planned_work(const Problem& problem, const ForwardPlan& plan) {
  WorkParams work = work_of(problem);
  work.heads = tile::Divisor(work.heads.value / plan.group.all * plan.group.parts());
  work.order = plan.order;
  return work;
}

// Totals of rows in the workspace, two numbers each, alike for every kernel that writes or reads them.
TensorView totals_in_workspace(const ForwardArgs& args, const ForwardPlan& plan) {
  const ConstTensorView& q = args.problem.q;
  return {static_cast<std::byte*>(args.run.workspace) + plan.totals_begin,
          DType::f32,
          {q.extent(0), q.extent(1), q.extent(2)},
          {2 * q.extent(1) * q.extent(2), 2 * q.extent(2), 2}};
}

Extras extras_of(const ForwardArgs& args, const ForwardPlan& plan, const ScoreScales& scales) {
  const Problem& problem = args.problem;
  Extras e;
  if (problem.soft_cap) {
    e.cap = compared_cap(*problem.soft_cap, scales);
    e.cap_before_bias = e.cap != 0 && problem.mask.bias.present() ? 1 : 0;
  }
  e.choosing_passes = plan.group.parts() > 1 ? plan.group.parts() : e.cap_before_bias;
  e.means = means_view_of(plan.means, problem, args.run.workspace);
  if (const Dropout& dropout = problem.dropout; dropout.probability > 0) {
    e.drop_below = core::dropout_threshold(dropout.probability);
    e.keep_probability = static_cast<float>(1 - dropout.probability);
    e.random = random_state_of(dropout);
  }
  if (plan.together) e.shared_totals = lse_of(totals_in_workspace(args, plan));
  e.counts_apart = plan.means.present || e.drop_below != 0 ? 1 : 0;
  e.present = e.cap != 0 || plan.means.present || e.drop_below != 0 || plan.together ? 1 : 0;
  return e;
}

// Of 16-bit inputs.
template <Kind kKind, int kTileK>
void set_copy_steps(ForwardParams& p, const Problem& problem) {
  const auto row_bytes = [](const ConstTensorView& rows) {
    return rows.step(2) * static_cast<std::int64_t>(size_bytes(rows.dtype));
  };
  p.cheap_copies = 1;
  p.k_steps = tile::k_copy_steps<layout_of(kKind), kTileK>(p.tiles, row_bytes(problem.k));
  p.v_steps = tile::v_copy_steps<layout_of(kKind), kTileK>(p.tiles, row_bytes(problem.v));
}

ForwardParams params_of(const ForwardArgs& args, const ForwardPlan& plan) {
  const Problem& problem = args.problem;
  const core::Geometry geometry = core::geometry_of(problem);
  ForwardParams p{};
  set_tensors(p, args);
  p.allowed = mask_of(problem.mask.allowed);
  p.bias = mask_of(problem.mask.bias);
  set_scoring(p, problem);
  p.work = planned_work(problem, plan);
  p.pages = pages_of(problem);
  p.group = plan.group;
  p.tiles = tile::key_tiles(layout_of(plan.kind), problem.pattern, problem.grouping, plan.shape.tile_k);
  p.bare_scores = p.bias.data == nullptr && p.allowed.data == nullptr && p.score_scale == 1 && p.pages.table == nullptr;
  p.extras = extras_of(args, plan, p.scales);
  p.one_of_two = problem.pattern == Pattern{1, 2} ? 1 : 0;
  p.d = static_cast<int>(geometry.d);
  p.d_v = static_cast<int>(geometry.d_v);
  p.column_parts = plan.column_parts;
  p.stages = plan.stages;
  if (plan.vector_k && plan.vector_v && !problem.block_table.present() && p.tiles.is_filled() &&
      problem.q.dtype != DType::f32) {
    const bool fours = plan.kind == Kind::fours;
    if (plan.shape.tile_k == 128) {
      fours ? set_copy_steps<Kind::fours, 128>(p, problem) : set_copy_steps<Kind::any, 128>(p, problem);
    } else {
      fours ? set_copy_steps<Kind::fours, 64>(p, problem) : set_copy_steps<Kind::any, 64>(p, problem);
    }
  }
  p.vector_q = plan.vector_q ? 1 : 0;
  p.vector_k = plan.vector_k ? 1 : 0;
  p.vector_v = plan.vector_v ? 1 : 0;
  p.vector_out = plan.vector_out ? 1 : 0;
  return p;
}

template <DType kType, Kind kKind>
Launcher launcher_in(Scope scope, int dim) {
  if constexpr (compiled_for(Scope::all, kType, kKind)) {
    if (scope == Scope::all) return launcher<kType, kKind, Scope::all>(dim);
  }
  if constexpr (compiled_for(Scope::brief, kType, kKind)) {
    if (scope == Scope::brief) return launcher<kType, kKind, Scope::brief>(dim);
  }
  return launcher<kType, kKind, Scope::plain>(dim);
}

Launcher launcher_of(DType type, const ForwardPlan& plan) {
  const Kind kind = plan.kind;
  const Scope scope = plan.scope;
  const int dim = plan.shape.dim;
  if (type == DType::bf16) {
    return kind == Kind::fours ? launcher_in<DType::bf16, Kind::fours>(scope, dim)
                               : launcher_in<DType::bf16, Kind::any>(scope, dim);
  }
  if (type == DType::f16) {
    return kind == Kind::fours ? launcher_in<DType::f16, Kind::fours>(scope, dim)
                               : launcher_in<DType::f16, Kind::any>(scope, dim);
  }
  return kind == Kind::pairs ? launcher_in<DType::f32, Kind::pairs>(scope, dim)
         : kind == Kind::any ? launcher_in<DType::f32, Kind::any>(scope, dim)
                             : launcher_in<DType::f32, Kind::precise>(scope, dim);
}

void launch_kernel(const Problem& problem, const ForwardPlan& plan, const ForwardParams& params, cudaStream_t stream) {
  const Launcher launch = launcher_of(problem.q.dtype, plan);
  launch(params, {grid_of(plan.ctas), plan.threads(), plan.shared_bytes}, stream);
}

// The totals of all visible scores, to the workspace.
void launch_totals(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  ForwardArgs dense{
      .problem = dense_problem(args.problem), .out = args.out, .lse = totals_in_workspace(args, plan), .run = {}};
  const ForwardPlan own = plan_forward(dense.problem, args.out, device_facts(args.problem.device.index), Scope::all);
  ForwardParams params = params_of(dense, own);
  params.out.data = nullptr;
  launch_kernel(dense.problem, own, params, stream);
}

}  // namespace

void why_not(DType type, const Problem& problem, core::Refusals& refusals) {
  const DeviceFacts& device = device_facts(problem.device.index);
  refuse_device(device, device.major >= 8, "8.0 (Ampere) or later", refusals);
  refuse_type(type, problem, refusals);
  refuse_pages(problem, refusals);
  const core::Geometry geometry = core::geometry_of(problem);
  refuse_rows(problem, geometry, refusals);
  constexpr std::int64_t kMaxTiles = (std::int64_t{1} << 31) - 1;  // CTAs of a grid
  if (const std::int64_t tiles = geometry.batch * geometry.heads * ((geometry.n_q + 31) / 32); tiles > kMaxTiles) {
    refusals.add([&] {
      return "batch * heads * n_q / 32: takes up to " + std::to_string(kMaxTiles) + ", got " + std::to_string(tiles);
    });
  }
  refuse_key_strides(problem.mask, std::int64_t{1} << 28, refusals);
}

std::string describe_plan(const Problem& problem) {
  if (is_empty(core::geometry_of(problem))) return {};
  return to_string(plan_forward(problem, contiguous_out(problem), device_facts(problem.device.index)));
}

void forward_launch(const ForwardArgs& args) {
  const Problem& problem = args.problem;
  const CurrentDevice device(problem.device.index);
  auto* stream = static_cast<cudaStream_t>(args.run.stream);
  if (problem.packed && problem.q.extent(1) > 0 && problem.q.extent(2) > 0) launch_prepare(packed_rows(args), stream);
  if (is_empty(core::geometry_of(problem))) return;
  const ForwardPlan plan = plan_forward(problem, args.out, device_facts(problem.device.index));
  if (plan.together) launch_totals(args, plan, stream);
  const ForwardParams params = params_of(args, plan);
  if (plan.means.present) {
    launch_means(means_params_of(plan.means, problem, params.work, args.run.workspace), stream);
  }
  launch_kernel(problem, plan, params, stream);
}

std::size_t forward_workspace(const ForwardArgs& args) {
  if (is_empty(core::geometry_of(args.problem))) return 0;
  return plan_forward(args.problem, args.out, device_facts(args.problem.device.index)).workspace_bytes;
}

}  // namespace dspattn::cuda::general
