#include "cuda/decode/decode.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <map>
#include <mutex>
#include <numbers>
#include <random>

#include "cuda/blocks/problem_params.h"
#include "cuda/blocks/refusals.h"
#include "cuda/decode/launch.h"
#include "cuda/decode/plan.h"
#include "cuda/device/device.h"
#include "cuda/ptx/tagged.h"

namespace dspattn::cuda::decode {
namespace {

using blocks::is_banded;
using blocks::is_empty;
using blocks::is_vector;
using blocks::mask_of;
using blocks::pages_of;
using blocks::rows_of;

std::uint32_t plain_row_bytes(const ConstTensorView& tensor) {
  const std::int64_t bytes = tensor.step(2) * static_cast<std::int64_t>(size_bytes(tensor.dtype));
  const bool plain = is_vector(tensor) && bytes > 0 && bytes < tile::kMaxRows;
  return plain ? static_cast<std::uint32_t>(bytes) : 0;
}

Scales scales_of(DType type, double scale, bool has_bias) {
  const double unit = type == DType::f32 ? (has_bias ? std::min(1.0, core::selection_scale(scale)) : 1.0)
                                         : core::selection_scale(scale);
  return {.unit = static_cast<float>(unit),
          .bias = static_cast<float>(unit / scale),
          .exponent = static_cast<float>(scale / unit * std::numbers::log2e),
          .rounds = type == DType::f32 ? 0 : 1};
}

// No two launches of a process have the same one, nor has memory that some other process has left: 48 random bits, on
// from which launches are counted in large steps.
std::uint64_t new_tag() {
  static std::atomic<std::uint64_t> next{(std::uint64_t{std::random_device{}()} << 32) ^ std::random_device{}()};
  constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15;  // odd: as many tags as there are numbers
  std::uint64_t tag = 0;
  do tag = (next.fetch_add(1, std::memory_order_relaxed) * kStep) << ptx::kCountBits;
  while (tag == 0);
  return tag;
}

Params params_of(const ForwardArgs& args, const Plan& plan) {
  const Problem& problem = args.problem;
  const core::Geometry geometry = core::geometry_of(problem);
  const core::Band band = core::band_of(problem.mask);
  Params p;
  p.q = rows_of(problem.q);
  p.k = rows_of(problem.k);
  p.v = rows_of(problem.v);
  p.results.out = blocks::out_of(args.out);
  p.results.lse = blocks::lse_of(args.lse);
  p.results.fp32 = args.out.dtype == DType::f32 ? 1 : 0;
  if (plan.splits > plan.cluster) {
    auto* workspace = static_cast<std::uint8_t*>(args.run.workspace);
    p.partials = {reinterpret_cast<float*>(workspace), reinterpret_cast<RowStats*>(workspace + plan.stats_offset),
                  partial_columns(geometry.d_v)};
  }
  if (plan.teams.chosen != 0 && plan.teams.stay == 0) {
    auto* workspace = static_cast<std::uint8_t*>(args.run.workspace);
    const int tiles_of_block = tile::kBlockKeys / tile_keys(problem.q.dtype, plan.dim);
    p.together = {reinterpret_cast<std::uint16_t*>(workspace + plan.scores_offset),
                  reinterpret_cast<RowStats*>(workspace + plan.whole_offset),
                  tile::divide_up(geometry.n_k, tile::kBlockKeys) * tiles_of_block};
  }
  if (plan.joins_last() || plan.teams.spread != 0) {
    auto* workspace = static_cast<std::uint8_t*>(args.run.workspace);
    if (plan.teams.spread != 0) p.together.told = workspace + plan.whole_offset;
    p.arrivals = {reinterpret_cast<std::uint64_t*>(workspace + plan.arrived_offset), new_tag()};
  }
  p.value_sums = blocks::read_sums_of(problem.value_sums);
  p.pages = pages_of(problem);
  p.values = {p.v, p.pages, problem.v.dtype, static_cast<int>(geometry.d_v)};
  p.allowed = mask_of(problem.mask.allowed);
  p.bias = mask_of(problem.mask.bias);
  p.bias_bytes = blocks::bias_bytes_of(problem.mask);
  p.key_lengths = blocks::lengths_of(problem.mask.key_lengths);
  p.left = tile::clamped_reach(band.left);
  p.right = tile::clamped_reach(band.right);
  p.diagonal = static_cast<int>((is_banded(problem.mask) ? band.offset : 0) +
                                (band.bottom_right ? geometry.n_k - geometry.n_q : 0));
  p.n_q = static_cast<int>(geometry.n_q);
  p.n_k = static_cast<int>(geometry.n_k);
  p.d = static_cast<int>(geometry.d);
  p.all_rows = static_cast<int>(rows_of_key_head(geometry));
  p.rows = plan.rows;
  p.row_tiles = tile::Divisor(plan.row_tiles);
  p.queries = tile::Divisor(p.n_q);
  p.heads_per_kv_head = static_cast<int>(geometry.heads / geometry.kv_heads);
  p.kv_heads = tile::Divisor(static_cast<int>(geometry.kv_heads));
  p.splits = tile::Divisor(plan.splits);
  p.cluster = tile::Divisor(plan.cluster);
  p.keys = tile::key_map(problem.pattern, problem.grouping, tile_keys(problem.q.dtype, plan.dim));
  p.pairs = problem.pattern.group == 2 ? 1 : 0;
  p.scales = scales_of(problem.q.dtype, geometry.scale, problem.mask.bias.present());
  p.teams = plan.teams;
  p.layout = plan.layout;
  p.chunks = tile::Divisor(plan.layout.chunks);
  p.team_shift = std::countr_zero(static_cast<unsigned>(plan.teams.warps));
  p.lane_shift = std::countr_zero(32u / static_cast<unsigned>(plan.teams.rows));
  p.vector_q = is_vector(problem.q) ? 1 : 0;
  p.vector_k = is_vector(problem.k) ? 1 : 0;
  p.vector_v = is_vector(problem.v) ? 1 : 0;
  p.k_row_bytes = plain_row_bytes(problem.k);
  p.v_row_bytes = plain_row_bytes(problem.v);
  const int keys_of_run = tile_keys(problem.q.dtype, plan.dim) / 4 * p.keys.group_step;
  p.runs = p.pages.table == nullptr || p.pages.size.value % keys_of_run == 0 ? 1 : 0;
  return p;
}

// Asked of a device once, when the first plan depends on it.
ClusterRoom room_of(int device_index) {
  static std::mutex mutex;
  static std::map<int, ClusterRoom> rooms;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = rooms.try_emplace(device_index);
  if (is_new) {
    const CurrentDevice device(device_index);
    for (int ctas = 2; ctas <= kMaxCluster; ++ctas) {
      found->second.clusters[static_cast<std::size_t>(ctas)] = room_for_clusters(ctas);
    }
  }
  return found->second;
}

Plan plan_for(const DecodeRow& row, const Problem& problem) {
  const DeviceFacts& device = device_facts(problem.device.index);
  const bool asks = device.present && device.major >= 9;
  return plan_of(row.dim, problem, device, asks ? room_of(problem.device.index) : ClusterRoom{});
}

}  // namespace

std::string row_name(const DecodeRow& row) {
  return "decode_" + std::string(name(row.type)) + "_d" + std::to_string(row.dim);
}

void why_not(const DecodeRow& row, const Problem& problem, core::Refusals& refusals) {
  const DeviceFacts& device = device_facts(problem.device.index);
  blocks::refuse_device(device, device.major >= 8, "8.0 (Ampere) or later", refusals);
  blocks::refuse_type(row.type, problem, refusals);
  if (!(problem.pattern == Pattern{2, 4} || problem.pattern == Pattern{1, 2})) {
    refusals.add([&] { return "pattern: takes 2:4 and 1:2, got " + to_string(problem.pattern); });
  }
  const core::Geometry geometry = core::geometry_of(problem);
  blocks::refuse_dims(row.dim_above, row.dim, geometry, refusals);
  if (problem.packed) refusals.add([] { return std::string("packed: takes batches that are not packed"); });
  if (const std::int64_t rows = rows_of_key_head(geometry); rows > kMostRows) {
    refusals.add([&] {
      return "n_q * heads / kv_heads: takes up to " + std::to_string(kMostRows) + " query rows a key head, got " +
             std::to_string(rows);
    });
  } else if (device.present && problem.q.dtype == row.type && !is_empty(geometry)) {
    if (const int bytes = plan_for(row, problem).layout.bytes; bytes > device.shared_bytes) {
      refusals.add([&] {
        return "device: needs " + std::to_string(bytes) + " bytes of shared memory a CTA, got " +
               std::to_string(device.shared_bytes);
      });
    }
  }
  if (problem.choice == Choice::shared && rows_of_key_head(geometry) > kWarpRows) {
    refusals.add([&] {
      return "n_q * heads / kv_heads: takes up to " + std::to_string(kWarpRows) +
             " query rows a key head where heads choose together, got " + std::to_string(rows_of_key_head(geometry));
    });
  }
  if (problem.rest == Rest::mean && sums_pruned(row.dim) && !problem.value_sums.present()) {
    refusals.add(
        [] { return std::string("rest: takes mean with value_sums (sums of V that the caller keeps), got none"); });
  }
  if (problem.rest == Rest::mean && sums_pruned(row.dim) &&
      (problem.mask.allowed.present() || problem.mask.bias.present())) {
    refusals.add(
        [] { return std::string("rest: takes mean without mask tensors, which value_sums know nothing of, got one"); });
  }
  blocks::refuse_pages(problem, refusals);
  blocks::refuse_rows(problem, geometry, refusals);
  blocks::refuse_offset(problem.mask, refusals);
  constexpr std::int64_t kMaxUnits = std::int64_t{1} << 24;  // times rows or splits of one: within a grid
  if (const std::int64_t units = geometry.batch * geometry.kv_heads; units > kMaxUnits) {
    refusals.add([&] {
      return "batch * kv_heads: takes up to " + std::to_string(kMaxUnits) + ", got " + std::to_string(units);
    });
  }
}

std::string describe_plan(const DecodeRow& row, const Problem& problem) {
  if (is_empty(core::geometry_of(problem))) return {};
  return to_string(plan_for(row, problem));
}

std::size_t workspace(const DecodeRow& row, const ForwardArgs& args) {
  if (is_empty(core::geometry_of(args.problem))) return 0;
  return plan_for(row, args.problem).workspace_bytes;
}

void forward_launch(const DecodeRow& row, const ForwardArgs& args) {
  if (is_empty(core::geometry_of(args.problem))) return;
  forward_launch(row, args, plan_for(row, args.problem));
}

void forward_launch(const DecodeRow& row, const ForwardArgs& args, const Plan& plan) {
  const CurrentDevice device(args.problem.device.index);
  const Params params = params_of(args, plan);
  auto* stream = static_cast<cudaStream_t>(args.run.stream);
  const auto launch = row.type == DType::bf16 ? launch_bf16 : row.type == DType::f16 ? launch_f16 : launch_f32;
  launch(row.dim, params, plan.ctas(), stream);
  if (plan.merges()) launch_merge(params, row.type, plan.units, stream);
}

}  // namespace dspattn::cuda::decode
