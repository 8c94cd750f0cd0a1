#include "cuda/general/plan.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

#include "core/geometry.h"
#include "cuda/blocks/means_plan.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::general {
namespace {

template <typename C>
Shape shape_from() {
  return {.dim = C::kScoreDim,
          .warp_rows = C::kWarpRows,
          .tile_k = C::kTileK,
          .warps = C::kWarps,
          .most_warps = C::kMostWarps,
          .ctas = C::kCtas,
          .takes_items = C::kTakesItems,
          .least_stages = C::kLeastStages,
          .own_bytes = C::kOwnBytes,
          .warp_q_bytes = C::kWarpQBytes,
          .warp_given_bytes = C::kGivenBytes,
          .key_bytes = {C::key_bytes(0), C::key_bytes(1), C::key_bytes(2)}};
}

template <DType kType, Kind kKind, Scope kScope, std::size_t kIndex = 0>
Shape shape_at(int dim) {
  if constexpr (compiled_at(kScope, kDims[kIndex])) {
    if (dim == kDims[kIndex]) return shape_from<Config<kType, kKind, kDims[kIndex], kScope>>();
  }
  if constexpr (kIndex + 1 < std::size(kDims)) return shape_at<kType, kKind, kScope, kIndex + 1>(dim);
  return {};
}

template <DType kType, Kind kKind>
Shape shape_in(Scope scope, int dim) {
  if constexpr (compiled_for(Scope::all, kType, kKind)) {
    if (scope == Scope::all) return shape_at<kType, kKind, Scope::all>(dim);
  }
  if constexpr (compiled_for(Scope::brief, kType, kKind)) {
    if (scope == Scope::brief) return shape_at<kType, kKind, Scope::brief>(dim);
  }
  return shape_at<kType, kKind, Scope::plain>(dim);
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::fours:
      return "sparse tensor cores";
    case Kind::pairs:
      return "sparse tensor cores, tf32";
    case Kind::any:
      return "tensor cores, pruned weights are zeros";
    case Kind::precise:
      return "full fp32, no tensor cores";
  }
  return "";
}

}  // namespace

Shape shape_of(DType type, Kind kind, Scope scope, int dim) {
  // Both 16-bit types have the same shapes.
  if (type != DType::f32) {
    return kind == Kind::fours ? shape_in<DType::bf16, Kind::fours>(scope, dim)
                               : shape_in<DType::bf16, Kind::any>(scope, dim);
  }
  return kind == Kind::pairs ? shape_in<DType::f32, Kind::pairs>(scope, dim)
         : kind == Kind::any ? shape_in<DType::f32, Kind::any>(scope, dim)
                             : shape_in<DType::f32, Kind::precise>(scope, dim);
}

Scope scope_of(const Problem& problem) {
  const bool prunes = !problem.pattern.is_dense();
  const bool all = problem.soft_cap || problem.dropout.probability > 0 || (prunes && problem.rest == Rest::mean) ||
                   (prunes && problem.choice == Choice::shared) || dim_of(problem) > 256;
  return all ? Scope::all : Scope::plain;
}

Kind kind_of(const Problem& problem, Scope scope) {
  const bool one_of_two = problem.pattern == Pattern{1, 2};
  const bool sparse = scope == Scope::plain && (one_of_two || problem.pattern == Pattern{2, 4});
  if (problem.q.dtype != DType::f32) return sparse ? Kind::fours : Kind::any;
  if (problem.fp32_products == Fp32Products::full) return Kind::precise;
  return sparse && one_of_two ? Kind::pairs : Kind::any;
}

int compiled_dim(Scope scope, int dim) {
  while (!compiled_at(scope, dim)) dim *= 2;
  return dim;
}

int dim_of(const Problem& problem) {
  const std::int64_t larger = std::max(problem.q.extent(3), problem.v.extent(3));
  for (const int dim : kDims) {
    if (larger <= dim) return dim;
  }
  return kDims[std::size(kDims) - 1];
}

namespace {

void plan_memory(ForwardPlan& plan, std::int64_t n_q, const DeviceFacts& device) {
  const Shape& shape = plan.shape;
  // A multiprocessor has 1 KiB more than a CTA may ask for. Two CTAs hide each other's waits, which a second stage does
  // less well: it comes second. A third is welcome where it fits besides.
  const auto fits = [&](int stages, int ctas, int warps) {
    return ctas * (shape.shared_bytes(warps, stages) + shape.own_bytes + kReservedBytes) <= device.shared_bytes + 1024;
  };
  plan.warps = shape.warps;
  const auto fit = [&](int stages, int ctas) { return fits(stages, ctas, shape.warps); };
  plan.stages = fit(2, 2) ? 2 : fit(1, 2) ? 1 : fit(2, 1) ? 2 : fit(1, 1) ? 1 : 0;
  plan.stages = std::max(plan.stages, shape.least_stages);
  plan.resident = shape.ctas;
  while (plan.resident > 1 && !fit(plan.stages, plan.resident)) --plan.resident;
  // Where there is room for one CTA, more warps rather than a second stage.
  if (plan.resident == 1 && shape.most_warps > shape.warps && fits(1, 1, shape.most_warps) &&
      n_q > shape.warps * shape.warp_rows) {
    plan.warps = shape.most_warps;
    plan.stages = 1;
  }
  plan.shared_bytes = shape.shared_bytes(plan.warps, plan.stages);
}

// Up to how many keys the shape for few is taken where rows see half of them, as measured (docs/log/general.md).
constexpr std::int64_t kMostBriefKeys = 512;

// Up to how many row tiles of a head a CTA takes several, as measured (docs/log/general.md). `unequal`: they do not see
// equally many keys.
int most_row_tiles(int dim, bool unequal) { return dim == 128 ? (unequal ? 16 : 8) : 0; }

// Which CTA takes which row tiles of which heads.
void plan_order(ForwardPlan& plan, const Problem& problem, const DeviceFacts& device) {
  const core::Geometry geometry = core::geometry_of(problem);
  const std::int64_t heads = geometry.batch * (geometry.heads / plan.group.all) * plan.group.parts();
  const std::int64_t items = heads * plan.row_tiles;
  const auto in_order = [&](std::int64_t workers, bool mirrored) {
    const auto [all, each] = std::pair{static_cast<int>(heads), static_cast<int>(workers)};
    plan.order = mirrored ? tile::mirrored_order(all, plan.row_tiles, each)
                          : tile::equal_order(all, plan.row_tiles, each, false);
    plan.ctas = workers * plan.column_parts;
  };
  // Short rows: what a CTA begins and ends with is hidden behind the rows before and after. Long ones, and those whose
  // cost only the device knows, are taken as CTAs become free.
  const std::int64_t workers = std::int64_t{plan.resident} * std::max(device.multiprocessors, 1);
  const Reach reach = reach_of(problem.mask);
  const bool unequal = std::min(reach.left, reach.right) < std::max(geometry.n_q, geometry.n_k) - 1;
  if (plan.shape.takes_items && plan.row_tiles <= most_row_tiles(plan.shape.dim, unequal) && items > workers &&
      !problem.packed && !problem.mask.key_lengths.present()) {
    in_order(workers, unequal);
  } else {
    in_order(items, false);
  }
}

// No more than half of the keys are seen by the row in the middle.
bool hides_half(const Problem& problem) {
  const core::Geometry geometry = core::geometry_of(problem);
  const core::KeyRange seen =
      core::band_of(problem.mask).row((geometry.n_q - 1) / 2, geometry.n_q, geometry.n_k, geometry.n_k);
  return 2 * (seen.end - seen.begin) <= geometry.n_k + 1;
}

// Takes the shape for few keys where that is faster.
void prefer_brief(ForwardPlan& plan, const Problem& problem, const DeviceFacts& device) {
  const core::Geometry geometry = core::geometry_of(problem);
  const bool timed = plan.kind == Kind::fours || problem.pattern.is_dense();
  if (plan.scope != Scope::plain || !compiled_for(Scope::brief, problem.q.dtype, plan.kind) || !timed ||
      !compiled_at(Scope::brief, plan.shape.dim) || geometry.n_k > kMostBriefKeys || !hides_half(problem)) {
    return;
  }
  ForwardPlan brief = plan;
  brief.scope = Scope::brief;
  brief.shape = shape_of(problem.q.dtype, plan.kind, Scope::brief, plan.shape.dim);
  plan_memory(brief, geometry.n_q, device);
  if (brief.resident == brief.shape.ctas) plan = brief;
}

}  // namespace

ForwardPlan plan_forward(const Problem& problem, const TensorView& out, const DeviceFacts& device, Scope least) {
  const core::Geometry geometry = core::geometry_of(problem);
  ForwardPlan plan;
  plan.together = problem.choice == Choice::shared && !problem.pattern.is_dense();
  plan.scope = std::max(scope_of(problem), least);
  plan.kind = kind_of(problem, plan.scope);
  plan.shape = shape_of(problem.q.dtype, plan.kind, plan.scope, compiled_dim(plan.scope, dim_of(problem)));
  plan_memory(plan, geometry.n_q, device);
  prefer_brief(plan, problem, device);
  const std::int64_t sharing = geometry.kv_heads > 0 ? geometry.heads / geometry.kv_heads : 1;
  if (plan.together) plan.group = tile::group_rows(static_cast<int>(sharing));
  plan.row_tiles = std::max(tile::divide_up(geometry.n_q, plan.group.positions(plan.tile_q())), 1);
  plan.column_parts =
      tile::divide_up(std::max<std::int64_t>(geometry.d_v, 1), out_columns(problem.q.dtype, plan.shape.dim));
  plan_order(plan, problem, device);
  plan.vector_q = blocks::is_vector(problem.q);
  plan.vector_k = blocks::is_vector(problem.k);
  plan.vector_v = blocks::is_vector(problem.v);
  plan.vector_out = blocks::is_vector(out);
  if (problem.rest == Rest::mean && !problem.pattern.is_dense()) {
    const Reach reach = reach_of(problem.mask);
    plan.means = blocks::plan_means(problem, reach.left, reach.right, plan.shape.dim, 0);
    plan.workspace_bytes = plan.means.end;
  }
  if (plan.together) {
    constexpr std::size_t kWorkspaceAlignment = 256;
    plan.totals_begin = (plan.workspace_bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    const std::int64_t rows = problem.q.extent(0) * problem.q.extent(1) * problem.q.extent(2);
    plan.workspace_bytes = plan.totals_begin + static_cast<std::size_t>(rows) * 2 * sizeof(float);
  }
  return plan;
}

Problem dense_problem(const Problem& problem) {
  Problem dense = problem;
  dense.pattern = Pattern::dense();
  dense.choice = Choice::each_head;
  dense.rest = Rest::drop;
  dense.value_sums = {};
  dense.dropout = {};
  dense.soft_cap.reset();
  dense.sinks = {};
  return dense;
}

Reach reach_of(const Mask& mask) {
  const core::Band band = core::band_of(mask);
  return {-tile::clamped_reach(band.offset - band.left), tile::clamped_reach(band.offset + band.right)};
}

std::string to_string(const ForwardPlan& plan) {
  const auto yes = [](bool x) { return x ? "yes" : "no"; };
  std::ostringstream text;
  text << "products    " << name_of(plan.kind) << ", compiled for d = " << plan.shape.dim
       << (plan.scope == Scope::all ? ", everything served" : "") << "\nCTA         " << plan.tile_q()
       << " query rows by " << plan.warps << " warps, key tiles of " << plan.shape.tile_k << ", " << plan.stages
       << (plan.stages == 1 ? " stage, " : " stages, ") << plan.shared_bytes << " bytes of shared memory, "
       << plan.resident << " a multiprocessor"
       << (plan.together ? "\nbefore      what all keys' weights add up to, by which heads choose together" : "")
       << (plan.means.present ? "\nbefore      means of V for the weight of pruned keys" : "")
       << (plan.workspace_bytes > 0 ? "\nworkspace   " + std::to_string(plan.workspace_bytes) + " bytes" : "")
       << "\n16 bytes    q " << yes(plan.vector_q) << ", k " << yes(plan.vector_k) << ", v " << yes(plan.vector_v)
       << ", out " << yes(plan.vector_out) << "\nlaunch      " << plan.ctas << " CTAs of " << plan.threads()
       << " threads" << (plan.order.rounds > 1 ? ", " + std::to_string(plan.order.rounds) + " row tiles each" : "");
  return text.str();
}

}  // namespace dspattn::cuda::general
