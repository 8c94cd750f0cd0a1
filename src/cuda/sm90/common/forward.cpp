#include "cuda/sm90/common/forward.h"

#include <algorithm>

#include "core/geometry.h"
#include "cuda/blocks/means.h"
#include "cuda/blocks/means_plan.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/blocks/refusals.h"
#include "cuda/blocks/schedule.h"
#include "cuda/blocks/tensor_maps.h"
#include "cuda/device/device.h"
#include "cuda/tile/coarse_exp2.h"

namespace dspattn::cuda::sm90 {
namespace {

// The first element of the last row of the last head.
std::int64_t last_row(const ConstTensorView& tensor) {
  std::int64_t offset = 0;
  for (int dim = 0; dim < 3; ++dim) offset += (tensor.extent(dim) - 1) * tensor.step(dim);
  return offset;
}

MaskParams masks_of(const Mask& mask, const core::Geometry& geometry, bool by_tma) {
  MaskParams p{};
  p.allowed = mask_of(mask.allowed);
  p.bias = mask_of(mask.bias);
  p.bias_bytes = bias_bytes_of(mask);
  p.bytes = mask.bias.present() ? p.bias_bytes : mask.allowed.present() ? 1 : 0;
  p.by_tma = by_tma ? 1 : 0;
  if (!by_tma) return p;
  const Extents extents = mask_extents(geometry);
  if (mask.allowed.present()) make_map(p.allowed_map, mask_shape(p.allowed, extents, 1), 1);
  if (mask.bias.present()) make_map(p.bias_map, mask_shape(p.bias, extents, p.bias_bytes), p.bias_bytes);
  return p;
}

WorkParams work_of(const Problem& problem, const ForwardPlan& plan) {
  WorkParams w = blocks::work_of(problem);
  w.order = plan.order;
  w.pairs = plan.pairs ? 1 : 0;
  w.descending = plan.descending ? 1 : 0;
  return w;
}

}  // namespace

std::string row_name(const FusedRow& row, const std::string& begin) {
  return begin + std::to_string(row.pattern.keep) + "_" + std::to_string(row.pattern.group) + "_" +
         std::string(name(row.type)) + "_d" + std::to_string(row.dim);
}

core::RowKey key_of(const FusedRow& row) { return {row.type, row.pattern, row.dim_above, row.dim}; }

ForwardParams params_of(const ForwardArgs& args, const ForwardPlan& plan) {
  const Problem& problem = args.problem;
  const core::Geometry geometry = core::geometry_of(problem);
  const DType type = problem.q.dtype;
  ForwardParams p{};
  set_tensors(p, args);
  p.masks = masks_of(problem.mask, geometry, plan.variant == Variant::general && plan.tma_masks);
  p.work = work_of(problem, plan);
  if (plan.walk == Walk::schedule) p.work.schedule = static_cast<tile::ScheduleHeader*>(args.run.workspace);
  p.scales = scales_of(type, geometry.scale, problem.mask.bias.present());
  p.d = static_cast<int>(geometry.d);
  if (plan.tma_q) make_map(p.q_map, rows_shape(p.q, extents_of(problem.q), type, plan.traits.tile_q, 1), type);
  if (plan.tma_out) {
    const int rows = plan.variant == Variant::full ? 64 : kStoredRows;  // a warpgroup's at once, or a warp's
    make_map(p.out_map, rows_shape(rows_of(args.out), extents_of(args.out), type, rows, 1), type);
  }
  p.tma_q = plan.tma_q ? 1 : 0;
  p.tma_k = plan.tma_k ? 1 : 0;
  p.tma_v = plan.tma_v ? 1 : 0;
  p.tma_out = plan.tma_out ? 1 : 0;
  p.vector_q = plan.vector_q ? 1 : 0;
  p.vector_k = plan.vector_k ? 1 : 0;
  p.vector_v = plan.vector_v ? 1 : 0;
  p.vector_out = plan.vector_out ? 1 : 0;
  // The kernels that write means wait for everything before them: nobody needs to wait once more.
  p.overlaps = plan.overlaps && !plan.means.present ? 1 : 0;
  p.short_items = plan.short_items ? 1 : 0;
  p.partial_blocks = plan.partial_blocks ? 1 : 0;
  p.last_k = last_row(problem.k);
  p.last_v = last_row(problem.v);
  p.means = means_view_of(plan.means, problem, args.run.workspace);
  p.coarse_slope = tile::coarse_slope(p.scales.exp2_scale_half);
  return p;
}

void clear_packed(const ForwardArgs& args) {
  if (!args.problem.packed || args.problem.q.extent(1) == 0 || args.problem.q.extent(2) == 0) return;
  launch_prepare(packed_rows(args), static_cast<cudaStream_t>(args.run.stream));
}

void prepare(const ForwardArgs& args, const ForwardPlan& plan, const ForwardParams& params, std::int64_t entries) {
  PrepareParams s = packed_rows(args);
  if (plan.walk == Walk::schedule) {
    s.header = params.work.schedule;
    s.entries = reinterpret_cast<tile::ScheduleEntry*>(s.header + 1);
    s.capacity = static_cast<int>(entries);
    s.tile_q = plan.traits.tile_q;
  }
  auto* stream = static_cast<cudaStream_t>(args.run.stream);
  launch_prepare(s, stream);
  if (plan.means.present) {
    launch_means(means_params_of(plan.means, args.problem, params.work, args.run.workspace), stream);
  }
}

void fused_why_not(const FusedRow& row, const Problem& problem, core::Refusals& refusals) {
  const DeviceFacts& device = device_facts(problem.device.index);
  refuse_device(device, device.major == 9, "9.0 (Hopper)", refusals);
  refuse_type(row.type, problem, refusals);
  if (!(problem.pattern == row.pattern)) {
    refusals.add([&] { return "pattern: takes " + to_string(row.pattern) + ", got " + to_string(problem.pattern); });
  }
  const core::Geometry geometry = core::geometry_of(problem);
  if (row.type == DType::f16 && !(geometry.scale >= kLeastFp16Scale && geometry.scale < kFp16ScaleEnd)) {
    refusals.add([&] {
      return "scale: takes 2^-14 to 2, for fp16 inputs are multiplied by the power of two below it, got " +
             std::to_string(geometry.scale);
    });
  }
  refuse_dims(row.dim_above, row.dim, geometry, refusals);
  refuse_rows(problem, geometry, refusals);
  refuse_offset(problem.mask, refusals);
  constexpr std::int64_t kMaxItems = std::int64_t{1} << 28;
  if (const std::int64_t items = geometry.batch * geometry.heads * ((geometry.n_q + 127) / 128); items > kMaxItems) {
    refusals.add([&] {
      return "batch * heads * n_q / 128: takes up to " + std::to_string(kMaxItems) + ", got " + std::to_string(items);
    });
  }
  refuse_key_strides(problem.mask, std::int64_t{1} << 21, refusals);  // 128 keys of 4 bytes within 32 bits
}

}  // namespace dspattn::cuda::sm90
