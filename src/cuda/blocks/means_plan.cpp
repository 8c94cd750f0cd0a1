#include "cuda/blocks/means_plan.h"

#include "core/geometry.h"
#include "cuda/blocks/problem_params.h"

namespace dspattn::cuda::blocks {

namespace {

constexpr std::size_t kAlignment = 256;  // of the workspace
constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

MeansPlan plan_means(const Problem& problem, int left, int right, int columns, std::size_t begin) {
  const core::Geometry geometry = core::geometry_of(problem);
  const Mask& mask = problem.mask;
  const auto by_head = [](const ConstTensorView& tensor) {
    return tensor.present() && tensor.extent(1) > 1 && tensor.step(1) != 0;
  };
  MeansPlan plan;
  plan.present = true;
  plan.heads = by_head(mask.allowed) || by_head(mask.bias) ? geometry.heads : geometry.kv_heads;
  plan.columns = columns;
  plan.table =
      tile::mean_table({.left = left,
                        .right = right,
                        .sequences = static_cast<int>(geometry.batch),
                        .n_q = static_cast<int>(geometry.n_q),
                        .n_k = static_cast<int>(geometry.n_k),
                        .packed = problem.packed.has_value(),
                        .masked = mask.allowed.present() || mask.bias.present() || problem.block_table.present(),
                        .lengths_known = !problem.packed && !mask.key_lengths.present(),
                        .q_rows = static_cast<int>(problem.q.extent(2)),
                        .k_rows = static_cast<int>(problem.k.extent(2))});
  plan.begin = aligned(begin);
  plan.end = plan.begin + tile::means_bytes(plan.table, plan.heads, columns).total;
  return plan;
}

bool may_own_means(const MeansPlan& plan, const Problem& problem) {
  const tile::MeanTable& table = plan.table;
  const bool same_lengths = !problem.packed && !problem.mask.key_lengths.present();
  return plan.present && table.per_block == 1 && table.by_row == 0 && same_lengths && table.blocks > 0 &&
         problem.v.dtype != DType::f32 && is_vector(problem.v) && plan.columns % tile::kTaskColumns == 0;
}

void own_means(MeansPlan& plan, const Problem& problem) {
  const core::Geometry geometry = core::geometry_of(problem);
  const auto heads = static_cast<int>(plan.heads);
  plan.own = true;
  plan.tasks = tile::mean_tasks(plan.table, static_cast<int>(geometry.batch), heads, plan.columns);
  const std::int64_t groups = geometry.batch * heads;
  const std::int64_t entries = plan.table.entries * heads * plan.columns;
  const std::int64_t sums = plan.tasks.sums_of(static_cast<int>(groups), 0);
  plan.counts = plan.begin + static_cast<std::size_t>(entries) * sizeof(float);
  plan.count_bytes = static_cast<std::size_t>(1 + groups) * sizeof(std::int32_t);
  plan.sums = aligned(plan.counts + plan.count_bytes);
  plan.end = plan.sums + static_cast<std::size_t>(sums) * sizeof(float);
}

OwnMeans own_means_of(const MeansPlan& plan, void* workspace) {
  if (!plan.own) return {};
  auto* bytes = static_cast<std::byte*>(workspace);
  return {reinterpret_cast<std::int32_t*>(bytes + plan.counts), reinterpret_cast<float*>(bytes + plan.begin),
          reinterpret_cast<float*>(bytes + plan.sums), plan.tasks};
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
