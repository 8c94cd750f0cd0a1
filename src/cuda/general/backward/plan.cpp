#include "cuda/general/backward/plan.h"

#include <algorithm>
#include <iterator>
#include <sstream>

#include "core/geometry.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/general/plan.h"
#include "cuda/general/problem.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::general::backward {
namespace {

// As many CTAs as registers allow hide each other's waits, which a second stage does less well: it comes second.
template <typename Bytes>
void choose_stages(KernelPlan& plan, const DeviceFacts& device, int most_stages, int most_ctas, Bytes bytes) {
  const auto fits = [&](int stages, int ctas) {
    return ctas * (bytes(stages) + kDescriptionBytes + kReservedBytes) <= device.shared_bytes + kReservedBytes;
  };
  plan.resident = most_ctas;
  while (plan.resident > 1 && !fits(1, plan.resident)) --plan.resident;
  plan.stages = most_stages > 1 && fits(2, plan.resident) ? 2 : 1;
  plan.shared_bytes = bytes(plan.stages);
}

template <typename C>
void take_config(BackwardPlan& plan, const DeviceFacts& device) {
  plan.stride = C::kStride;
  plan.has_key_rows = C::kKeyRows;
  using Q = typename C::Queries;
  plan.queries.rows = Q::kTileQ;
  plan.queries.keys = C::kTileK;
  plan.queries.threads = Q::kThreads;
  plan.column_parts = Q::kColumnParts;
  choose_stages(plan.queries, device, 2, Q::kCtas, &Q::shared_bytes);
  using K = typename C::Keys;
  plan.keys.rows = K::kTileQ;
  plan.adds_queries = K::kAddsQueries && plan.kind != Kind::precise;
  // As many keys as a CTA can have, so that few CTAs add to a dQ; a CTA of fewer has company.
  const auto fits = [&](int tiles) { return K::shared_bytes(tiles, 1) + kDescriptionBytes <= device.shared_bytes; };
  int tiles = K::kMaxTiles;
  while (!fits(tiles)) tiles /= 2;
  plan.keys.keys = tiles * C::kTileK;
  plan.keys.threads = 32 * tiles * K::kSplit;
  choose_stages(plan.keys, device, K::kWeightsOverKeys ? 1 : 2, K::kCtas * K::kMaxTiles / tiles,
                [&](int stages) { return K::shared_bytes(tiles, stages); });
}

// Both kinds of fp32 products have the same shapes, and both 16-bit types.
template <DType kType, int kDim>
void take_config_of(BackwardPlan& plan, const DeviceFacts& device) {
  if constexpr (compiled_at(kType, Kind::any, Features::plain, kDim)) {
    if (plan.is_plain) return take_config<Config<kType, Kind::any, kDim, Features::plain>>(plan, device);
  }
  take_config<Config<kType, Kind::any, kDim>>(plan, device);
}

template <DType kType>
void take_config_at(BackwardPlan& plan, const DeviceFacts& device) {
  static_assert(std::size(kBackwardDims) == 4);
  plan.dim == kBackwardDims[0]   ? take_config_of<kType, kBackwardDims[0]>(plan, device)
  : plan.dim == kBackwardDims[1] ? take_config_of<kType, kBackwardDims[1]>(plan, device)
  : plan.dim == kBackwardDims[2] ? take_config_of<kType, kBackwardDims[2]>(plan, device)
                                 : take_config_of<kType, kBackwardDims[3]>(plan, device);
}

// The smallest head dim that there is an instance for.
int dim_of(const BackwardPlan& plan, DType type, std::int64_t larger) {
  const Features features = plan.is_plain ? Features::plain : Features::all;
  for (const int dim : kBackwardDims) {
    if (dim >= larger && compiled_at(type, plan.kind, features, dim)) return dim;
  }
  return *std::rbegin(kBackwardDims);
}

// Whether the instance without features serves it.
bool is_plain(const Problem& problem, int unit_keys) {
  return problem.q.dtype != DType::f32 && unit_keys == tile::kBlockKeys && !problem.soft_cap &&
         problem.dropout.probability == 0 && !problem.mask.bias.present() && !problem.mask.allowed.present() &&
         scaling_of(problem).score_scale == 1;
}

// Parts of the workspace one behind the other.
WorkspaceOffsets lay_out(const BackwardPlan& plan, const core::Geometry& geometry, const TensorView& d_bias) {
  WorkspaceOffsets at;
  const auto take = [&](std::size_t& offset, std::int64_t bytes) {
    constexpr std::size_t kAlignment = 256;
    offset = at.bytes;
    at.bytes += (static_cast<std::size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  };
  const std::int64_t rows = geometry.heads * plan.head_rows;
  take(at.q, rows * plan.stride);
  take(at.d_out, rows * plan.stride);
  take(at.numbers, rows * 16);
  take(at.keys, plan.loads_keys ? 0 : geometry.kv_heads * plan.head_tiles * 64 * plan.stride);
  const bool summed = d_bias.present() && (d_bias.extent(2) == 1 || d_bias.extent(3) == 1);
  take(at.bias_parts, summed ? geometry.batch * geometry.heads * d_bias.extent(2) * d_bias.extent(3) * 4 : 0);
  if (!plan.adds_queries) return at;
  const std::int64_t sums = plan.wraps ? 2 : 1;
  take(at.sums, sums * rows * plan.dim * 4);
  take(at.counts, sums * rows / plan.keys.rows * 4);
  take(at.taken, 4);
  return at;
}

}  // namespace

BackwardPlan plan_backward(const Problem& problem, const TensorView& d_bias, const DeviceFacts& device) {
  const core::Geometry geometry = core::geometry_of(problem);
  const bool fp32 = problem.q.dtype == DType::f32;
  BackwardPlan plan;
  plan.kind = fp32 && problem.fp32_products == Fp32Products::full ? Kind::precise : Kind::any;
  const std::int64_t larger = std::max(geometry.d, geometry.d_v);
  const tile::KeyTiles tiles = tile::key_tiles(tile::TileLayout::places, problem.pattern, problem.grouping, 32);
  const int unit_keys = kTileUnit * tiles.span >> tiles.parts_log2;
  plan.is_plain = larger <= 128 && is_plain(problem, unit_keys) && geometry.n_q > 0 && geometry.n_k > 0;
  plan.dim = dim_of(plan, problem.q.dtype, larger);
  fp32 ? take_config_at<DType::f32>(plan, device) : take_config_at<DType::bf16>(plan, device);

  plan.row_tiles = tile::divide_up(geometry.n_q, plan.queries.rows);
  plan.row_units = tile::divide_up(geometry.n_q, kRowUnit);
  plan.tile_units = tile::divide_up(geometry.n_k, unit_keys);
  plan.key_groups = plan.tile_units * (kTileUnit * 32 / plan.keys.keys);
  plan.head_rows =
      kRowUnit * (problem.packed ? problem.q.extent(2) / kRowUnit + geometry.batch : geometry.batch * plan.row_units);
  plan.head_tiles = kTileUnit * (problem.packed ? problem.k.extent(2) / unit_keys + geometry.batch
                                                : geometry.batch * plan.tile_units);
  plan.queries.ctas = geometry.batch * geometry.heads * plan.row_tiles * plan.column_parts;
  plan.keys.ctas = geometry.batch * geometry.kv_heads * plan.key_groups;
  // Shares of dQ are counted by blocks of 128 keys.
  plan.adds_queries = plan.adds_queries && unit_keys == tile::kBlockKeys && geometry.n_q > 0 && geometry.n_k > 0;
  plan.wraps = plan.adds_queries && !problem.mask.causal && !problem.mask.window_right && geometry.n_q > plan.keys.rows;
  // Where walks differ in length the longest come last, but for the last heads': those that the card works on at a
  // time, so that caches hold them.
  if (plan.adds_queries && !plan.wraps) {
    plan.head_group = std::max(1, device.multiprocessors * plan.keys.resident / std::max(plan.key_groups, 1));
    plan.last_ascends = true;
  }
  plan.finds_references = problem.mask.bias.present();
  // Every key is loaded by one CTA, once; a bias asks for the query-stationary kernel, which wants prepared ones.
  plan.loads_keys =
      plan.adds_queries && !problem.mask.bias.present() && blocks::is_vector(problem.k) && blocks::is_vector(problem.v);
  plan.workspace = lay_out(plan, geometry, d_bias);
  return plan;
}

std::string to_string(const BackwardPlan& plan) {
  std::ostringstream text;
  const auto describe = [&](const char* name, const KernelPlan& kernel) {
    text << name << kernel.rows << " query rows x " << kernel.keys << " keys by " << kernel.threads / 32 << " warps, "
         << kernel.stages << (kernel.stages == 1 ? " stage, " : " stages, ") << kernel.shared_bytes
         << " bytes of shared memory, " << kernel.resident << " a multiprocessor, " << kernel.ctas << " CTAs\n";
  };
  text << "products    " << (plan.kind == Kind::precise ? "full fp32, no tensor cores" : "tensor cores")
       << ", compiled for d = " << plan.dim << "\n";
  describe("dQ          ", plan.queries);
  describe("dK, dV      ", plan.keys);
  if (plan.is_plain) text << "no features  of masks and weights are compiled in\n";
  if (plan.has_key_rows) text << "scores      have keys as rows\n";
  text << "workspace   " << plan.workspace.bytes << " bytes";
  if (plan.loads_keys) text << "\nK, V        are loaded as they are";
  if (plan.finds_references) text << "\nreferences  found again where an LSE is too large";
  return text.str();
}

}  // namespace dspattn::cuda::general::backward
