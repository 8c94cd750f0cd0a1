#include "cuda/general/backward/backward.h"

#include <algorithm>

#include "core/dropout.h"
#include "core/geometry.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/device/device.h"
#include "cuda/general/backward/bias_walk.h"
#include "cuda/general/backward/launch.h"
#include "cuda/general/backward/plan.h"
#include "cuda/general/backward/prepare.h"
#include "cuda/general/problem.h"

namespace dspattn::cuda::general::backward {
namespace {

Dropping dropping_of(const Dropout& dropout) {
  if (dropout.probability <= 0) return {};
  Dropping d;
  // A threshold of 0 says that nothing is dropped, and nearly nothing is.
  d.threshold = std::max(core::dropout_threshold(dropout.probability), 1u);
  d.factor = static_cast<float>(1 / (1 - dropout.probability));
  d.random = random_state_of(dropout);
  return d;
}

BiasGradient bias_gradient_of(const TensorView& d_bias, const core::Geometry& geometry) {
  BiasGradient g;
  if (!d_bias.present()) return g;
  g.data = d_bias.data;
  for (int dim = 0; dim < 4; ++dim) {
    g.stride[dim] = d_bias.step(dim);
    g.extent[dim] = static_cast<int>(d_bias.extent(dim));
  }
  g.is_fp32 = d_bias.dtype == DType::f32 ? 1 : 0;
  g.sums_rows = g.extent[2] == 1 && geometry.n_q != 1 ? 1 : 0;
  g.sums_keys = g.extent[3] == 1 && geometry.n_k != 1 ? 1 : 0;
  return g;
}

Prepared prepared_of(const BackwardPlan& plan, void* workspace) {
  auto* base = static_cast<std::uint8_t*>(workspace);
  const WorkspaceOffsets& at = plan.workspace;
  return {base + at.q,
          base + at.d_out,
          reinterpret_cast<RowNumbers*>(base + at.numbers),
          base + at.keys,
          reinterpret_cast<float*>(base + at.bias_parts),
          reinterpret_cast<float*>(base + at.sums),
          reinterpret_cast<std::int32_t*>(base + at.counts),
          reinterpret_cast<std::int32_t*>(base + at.taken),
          plan.head_rows,
          plan.head_tiles};
}

BackwardParams params_of(const BackwardArgs& args, const BackwardPlan& plan) {
  const Problem& problem = args.problem;
  const core::Geometry geometry = core::geometry_of(problem);
  const auto vector = [](const ConstTensorView& tensor) { return blocks::is_vector(tensor) ? 1 : 0; };
  const auto fp32 = [](const auto& tensor) { return tensor.dtype == DType::f32 ? 1 : 0; };
  BackwardParams p;
  set_tensors(p, args);
  set_scoring(p, problem);
  p.work = work_of(problem);
  p.tiles = tile::key_tiles(tile::TileLayout::places, problem.pattern, problem.grouping, plan.queries.keys);
  p.prepared = prepared_of(plan, args.run.workspace);
  p.dropping = dropping_of(problem.dropout);
  p.bias_gradient = bias_gradient_of(args.d_bias, geometry);
  if (args.d_sinks.present()) {
    p.d_sinks = static_cast<float*>(args.d_sinks.data);
    p.d_sink_stride = args.d_sinks.step(0);
  }
  const bool is_fp32 = problem.q.dtype == DType::f32;
  if (problem.soft_cap) p.cap = compared_cap(*problem.soft_cap, p.scales);
  p.d_q_scale = static_cast<float>(geometry.scale);
  const bool scales_q = !is_fp32 && p.score_scale == 1;
  p.d_k_scale = static_cast<float>(scales_q ? geometry.scale / core::selection_scale(geometry.scale) : geometry.scale);
  p.sequences = static_cast<int>(geometry.batch);
  p.kv_heads = static_cast<int>(geometry.kv_heads);
  p.d = static_cast<int>(geometry.d);
  p.value_d = static_cast<int>(geometry.d_v);
  p.stride = plan.stride;
  p.tf32 = is_fp32 && plan.kind != Kind::precise ? 1 : 0;
  p.row_units = plan.row_units;
  p.tile_units = plan.tile_units;
  p.row_tiles = plan.row_tiles;
  p.key_rows = plan.has_key_rows ? 1 : 0;
  p.key_tiles = plan.keys.keys / 32;
  p.items = {tile::Divisor(std::max(plan.key_groups, 1)), p.sequences * p.kv_heads, plan.head_group, plan.last_ascends};
  p.loads_keys = plan.loads_keys ? 1 : 0;
  p.adds_queries = plan.adds_queries ? 1 : 0;
  p.wraps = plan.wraps ? 1 : 0;
  p.key_tile_q = plan.keys.rows;
  p.query_stages = plan.queries.stages;
  p.key_stages = plan.keys.stages;
  p.vector_q = vector(problem.q);
  p.vector_k = vector(problem.k);
  p.vector_v = vector(problem.v);
  p.vector_out = vector(args.out);
  p.vector_d_out = vector(args.d_out);
  p.fp32_out = fp32(args.out);
  p.fp32_d_out = fp32(args.d_out);
  p.fp32_d_q = fp32(args.d_q);
  p.fp32_d_k = fp32(args.d_k);
  p.fp32_d_v = fp32(args.d_v);
  return p;
}

Launchers launchers_of(DType type, Kind kind, int dim) {
  if (type == DType::bf16) return launchers<DType::bf16, Kind::any>(dim);
  if (type == DType::f16) return launchers<DType::f16, Kind::any>(dim);
  return kind == Kind::precise ? launchers<DType::f32, Kind::precise>(dim) : launchers<DType::f32, Kind::any>(dim);
}

void clear(const TensorView& tensor, cudaStream_t stream) {
  launch_clear({out_of(tensor), static_cast<int>(size_bytes(tensor.dtype)), tensor.extent(0), tensor.extent(2),
                static_cast<int>(tensor.extent(1))},
               stream);
}

}  // namespace

void size_why_not(const Problem& problem, core::Refusals& refusals) {
  const core::Geometry geometry = core::geometry_of(problem);
  // fp32 rows past 256 columns need more shared memory than small cards have.
  const bool is_small = problem.q.dtype == DType::f32 && device_facts(problem.device.index).shared_bytes < 200 * 1024;
  const int most = is_small ? kBackwardDims[2] : kBackwardDims[3];
  if (const std::int64_t larger = std::max(geometry.d, geometry.d_v); larger > most) {
    refusals.add([&] { return "d, d_v: takes up to " + std::to_string(most) + ", got " + std::to_string(larger); });
  }
  constexpr std::int64_t kMaxTiles = (std::int64_t{1} << 31) - 1;  // CTAs of a grid
  if (const std::int64_t tiles = geometry.batch * geometry.kv_heads * ((geometry.n_k + 7) / 8); tiles > kMaxTiles) {
    refusals.add([&] {
      return "batch * kv_heads * n_k / 8: takes up to " + std::to_string(kMaxTiles) + ", got " + std::to_string(tiles);
    });
  }
}

std::string describe_plan(const Problem& problem) {
  const core::Geometry geometry = core::geometry_of(problem);
  if (geometry.batch == 0 || geometry.heads == 0) return {};
  return to_string(plan_backward(problem, {}, device_facts(problem.device.index)));
}

std::size_t workspace_bytes(const BackwardArgs& args) {
  const core::Geometry geometry = core::geometry_of(args.problem);
  if (geometry.batch == 0 || geometry.heads == 0) return 0;
  return plan_backward(args.problem, args.d_bias, device_facts(args.problem.device.index)).workspace.bytes;
}

void backward_launch(const BackwardArgs& args) {
  const Problem& problem = args.problem;
  const CurrentDevice device(problem.device.index);
  auto* stream = static_cast<cudaStream_t>(args.run.stream);
  const core::Geometry geometry = core::geometry_of(problem);
  const bool nothing = geometry.batch == 0 || geometry.heads == 0;
  if (nothing || problem.packed) {  // of a packed batch some rows may belong to no sequence
    clear(args.d_q, stream);
    clear(args.d_k, stream);
    clear(args.d_v, stream);
  }
  const DType type = problem.q.dtype;
  if (nothing) {
    BackwardParams none;
    none.bias_gradient = bias_gradient_of(args.d_bias, geometry);
    if (args.d_bias.present()) launch_sum_bias(none, type, true, stream);
    if (args.d_sinks.present()) {
      launch_clear_sinks(static_cast<float*>(args.d_sinks.data), args.d_sinks.step(0),
                         static_cast<unsigned>(geometry.heads), stream);
    }
    return;
  }
  const BackwardPlan plan = plan_backward(problem, args.d_bias, device_facts(problem.device.index));
  const Launchers launch = launchers_of(type, plan.kind, plan.dim);
  const LaunchArgs queries{grid_of(plan.queries.ctas), plan.queries.threads, plan.queries.shared_bytes};
  BackwardParams params = params_of(args, plan);
  launch_prepare(params, type, stream);
  if (args.d_sinks.present()) launch_sink_gradients(params, stream);
  if (plan.finds_references && queries.ctas > 0) {
    params.target = Target::references;
    launch.queries(params, {grid_of(plan.queries.ctas / plan.column_parts), queries.threads, queries.shared_bytes},
                   stream);
  }
  params.target = Target::queries;
  if (queries.ctas > 0 && !plan.adds_queries) launch.queries(params, queries, stream);
  if (plan.keys.ctas > 0) {
    const auto launch_keys = plan.is_plain ? launch.plain_keys : launch.keys;
    launch_keys(params, {grid_of(plan.keys.ctas), plan.keys.threads, plan.keys.shared_bytes}, stream);
  }
  if (plan.adds_queries) launch_finish_queries(params, type, stream);
  if (!args.d_bias.present()) return;
  params.target = Target::bias;
  const BiasGradient& g = params.bias_gradient;
  const bool zeros = geometry.n_q == 0 || geometry.n_k == 0;
  const bool parts = g.sums_rows != 0 || g.sums_keys != 0;
  // The tensor of a packed batch may have more rows and keys than any sequence.
  if (!parts && !zeros && (g.extent[2] > geometry.n_q || g.extent[3] > geometry.n_k)) {
    launch_sum_bias(params, type, true, stream);
  }
  if (!zeros) {
    launch.queries(params, {grid_of(bias_ctas(params)), queries.threads, queries.shared_bytes}, stream);
  }
  if (zeros || parts) launch_sum_bias(params, type, zeros, stream);
}

}  // namespace dspattn::cuda::general::backward
