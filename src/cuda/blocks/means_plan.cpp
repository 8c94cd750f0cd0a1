#include "cuda/blocks/means_plan.h"

#include "core/geometry.h"
#include "cuda/blocks/problem_params.h"

namespace dspattn::cuda::blocks {
namespace {

// A window that reaches back to key 0 from every row bounds none.
int binding_left(const WorkParams& work, int left) {
  const std::int64_t last_row = std::int64_t{work.bottom_right != 0 ? work.n_k : work.n_q} - 1 + work.offset;
  return left >= last_row ? tile::kMaxRows : left;
}

}  // namespace

MeansPlan plan_means(const Problem& problem, int left, int right, int columns, std::size_t begin) {
  const core::Geometry geometry = core::geometry_of(problem);
  const Mask& mask = problem.mask;
  const auto by_head = [](const ConstTensorView& tensor) {
    return tensor.present() && tensor.extent(1) > 1 && tensor.step(1) != 0;
  };
  constexpr std::size_t kAlignment = 256;  // of the workspace
  MeansPlan plan;
  plan.present = true;
  plan.heads = by_head(mask.allowed) || by_head(mask.bias) ? geometry.heads : geometry.kv_heads;
  plan.columns = columns;
  plan.table =
      tile::mean_table({.left = binding_left(work_of(problem), left),
                        .right = right,
                        .sequences = static_cast<int>(geometry.batch),
                        .n_q = static_cast<int>(geometry.n_q),
                        .n_k = static_cast<int>(geometry.n_k),
                        .packed = problem.packed.has_value(),
                        .masked = mask.allowed.present() || mask.bias.present() || problem.block_table.present(),
                        .lengths_known = !problem.packed && !mask.key_lengths.present(),
                        .q_rows = static_cast<int>(problem.q.extent(2)),
                        .k_rows = static_cast<int>(problem.k.extent(2))});
  plan.begin = (begin + kAlignment - 1) / kAlignment * kAlignment;
  plan.end = plan.begin + tile::means_bytes(plan.table, plan.heads, columns).total;
  return plan;
}

MeansView means_view_of(const MeansPlan& plan, const Problem& problem, const void* workspace) {
  if (!plan.present) return {};
  const std::int64_t heads = core::geometry_of(problem).heads;
  return {reinterpret_cast<const float*>(static_cast<const std::byte*>(workspace) + plan.begin), plan.table,
          tile::Divisor(static_cast<int>(heads / plan.heads))};
}

MeansParams means_params_of(const MeansPlan& plan, const Problem& problem, const WorkParams& work, void* workspace) {
  const core::Geometry geometry = core::geometry_of(problem);
  auto* table = static_cast<std::byte*>(workspace) + plan.begin;
  const tile::MeansBytes bytes = tile::means_bytes(plan.table, plan.heads, plan.columns);
  MeansParams m;
  m.v = rows_of(problem.v);
  m.pages = pages_of(problem);
  m.type = problem.v.dtype;
  m.columns = static_cast<int>(geometry.d_v);
  m.vector = is_vector(problem.v) ? 1 : 0;
  m.heads = static_cast<int>(plan.heads);
  m.heads_per_key_head = tile::Divisor(static_cast<int>(plan.heads / geometry.kv_heads));
  m.allowed = mask_of(problem.mask.allowed);
  m.bias = mask_of(problem.mask.bias);
  m.bias_bytes = bias_bytes_of(problem.mask);
  m.work = work;
  m.sequences = static_cast<int>(geometry.batch);
  m.table = plan.table;
  m.stride = plan.columns;
  m.means = reinterpret_cast<float*>(table);
  m.sums = reinterpret_cast<float*>(table + bytes.sums);
  m.counts = reinterpret_cast<int*>(table + bytes.counts);
  return m;
}

}  // namespace dspattn::cuda::blocks
