#include "cuda/general/forward.h"

#include <algorithm>
#include <cstdlib>

#include "core/geometry.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/blocks/schedule.h"
#include "cuda/device/device.h"
#include "cuda/general/launch.h"
#include "cuda/general/plan.h"
#include "cuda/general/problem.h"

namespace dspattn::cuda::general {
namespace {

ForwardParams params_of(const ForwardArgs& args, const ForwardPlan& plan) {
  const Problem& problem = args.problem;
  const core::Geometry geometry = core::geometry_of(problem);
  ForwardParams p{};
  p.q = rows_of(problem.q);
  p.k = rows_of(problem.k);
  p.v = rows_of(problem.v);
  p.out = out_of(args.out);
  p.lse = lse_of(args.lse);
  p.allowed = mask_of(problem.mask.allowed);
  p.bias = mask_of(problem.mask.bias);
  p.bias_type =
      problem.mask.bias.present() && problem.mask.bias.dtype != DType::f32 ? BiasType::as_inputs : BiasType::f32;
  if (problem.sinks.present()) {
    p.sinks = static_cast<const float*>(problem.sinks.data);
    p.sink_stride = problem.sinks.step(0);
  }
  p.work = work_of(problem);
  p.tiles = tile::key_tiles(layout_of(plan.kind), problem.pattern, problem.grouping, plan.shape.tile_k);
  const Scaling scaling = scaling_of(problem);
  p.scales = scaling.scales;
  p.score_scale = scaling.score_scale;
  p.keep = problem.pattern.is_dense() ? 0 : problem.pattern.keep;
  p.one_of_two = problem.pattern == Pattern{1, 2} ? 1 : 0;
  p.d = static_cast<int>(geometry.d);
  p.d_v = static_cast<int>(geometry.d_v);
  p.row_tiles = plan.row_tiles;
  p.stages = plan.stages;
  p.vector_q = plan.vector_q ? 1 : 0;
  p.vector_k = plan.vector_k ? 1 : 0;
  p.vector_v = plan.vector_v ? 1 : 0;
  p.vector_out = plan.vector_out ? 1 : 0;
  p.fp32_out = args.out.dtype == DType::f32 ? 1 : 0;
  return p;
}

Launcher launcher_of(DType type, Kind kind, int dim) {
  if (type == DType::bf16) {
    return kind == Kind::fours ? launcher<DType::bf16, Kind::fours>(dim) : launcher<DType::bf16, Kind::any>(dim);
  }
  if (type == DType::f16) {
    return kind == Kind::fours ? launcher<DType::f16, Kind::fours>(dim) : launcher<DType::f16, Kind::any>(dim);
  }
  return kind == Kind::pairs ? launcher<DType::f32, Kind::pairs>(dim)
         : kind == Kind::any ? launcher<DType::f32, Kind::any>(dim)
                             : launcher<DType::f32, Kind::precise>(dim);
}

// A stand-in for an output that nobody has given yet: contiguous and aligned.
TensorView contiguous_out(const Problem& problem) {
  auto* stand_in = reinterpret_cast<void*>(std::uintptr_t{1} << 12);  // never read or written
  return {
      stand_in, problem.q.dtype, {problem.q.extent(0), problem.q.extent(1), problem.q.extent(2), problem.v.extent(3)}};
}

}  // namespace

void why_not(DType type, const Problem& problem, core::Refusals& refusals) {
  const DeviceFacts& device = device_facts(problem.device.index);
  if (!device.present) {
    refusals.add([&] { return "device: " + device.absence; });
  } else if (device.major < 8) {
    refusals.add([&] {
      return "device: needs compute capability 8.0 (Ampere) or later, got " + std::to_string(device.major) + "." +
             std::to_string(device.minor);
    });
  }
  if (problem.q.dtype != type) {
    refusals.add([&] { return "q: takes " + std::string(name(type)) + ", got " + std::string(name(problem.q.dtype)); });
  }
  // Positions and sums of them stay within 32 bits.
  const core::Geometry geometry = core::geometry_of(problem);
  if (const std::int64_t rows = std::max(geometry.n_q, geometry.n_k); rows > tile::kMaxRows) {
    refusals.add(
        [&] { return "n_q, n_k: takes up to " + std::to_string(tile::kMaxRows) + ", got " + std::to_string(rows); });
  }
  constexpr std::int64_t kMaxPacked = std::int64_t{1} << 30;
  if (const std::int64_t rows = std::max(problem.q.extent(2), problem.k.extent(2));
      problem.packed && rows > kMaxPacked) {
    refusals.add([&] {
      return "q.shape[2], k.shape[2]: takes up to " + std::to_string(kMaxPacked) + " rows of a packed batch, got " +
             std::to_string(rows);
    });
  }
  constexpr std::int64_t kMaxTiles = (std::int64_t{1} << 31) - 1;  // CTAs of a grid
  if (const std::int64_t tiles = geometry.batch * geometry.heads * ((geometry.n_q + 31) / 32); tiles > kMaxTiles) {
    refusals.add([&] {
      return "batch * heads * n_q / 32: takes up to " + std::to_string(kMaxTiles) + ", got " + std::to_string(tiles);
    });
  }
  for (const auto& [mask, which] : {std::pair{&problem.mask.allowed, "allowed"}, {&problem.mask.bias, "bias"}}) {
    constexpr std::int64_t kMaxKeyStride = std::int64_t{1} << 28;
    if (mask->present() && mask->extent(3) > 1 && std::abs(mask->step(3)) > kMaxKeyStride) {
      refusals.add([&] {
        return std::string(which) + ": takes a stride along the keys of up to " + std::to_string(kMaxKeyStride) +
               ", got " + std::to_string(mask->step(3));
      });
    }
  }
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
  const Launcher launch = launcher_of(problem.q.dtype, plan.kind, plan.shape.dim);
  launch(params_of(args, plan), {grid_of(plan.ctas), plan.shape.threads, plan.shared_bytes()}, stream);
}

}  // namespace dspattn::cuda::general
