#include "cuda/sm90/backward/plan.h"

#include <algorithm>
#include <sstream>

#include "core/geometry.h"
#include "cuda/sm90/backward/config.h"
#include "cuda/sm90/backward/params.h"
#include "cuda/tile/head_dims.h"
#include "cuda/tile/key_row_masks.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::sm90::backward {
namespace {

// Tile sizes do not depend on type and pattern.
template <int kDim>
BackwardPlan plan_from() {
  using C = Config<DType::bf16, Selection::two_of_four, kDim>;
  BackwardPlan plan;
  plan.dim = kDim;
  plan.tile_q = C::kTileQ;
  plan.keys = C::kKeys;
  plan.score_keys = kPartKeys;
  plan.stages = C::kStages;
  plan.d_copies = C::kCopiesOfD;
  plan.threads = C::kThreads;
  plan.bias_copied = has_bias_kernel(kDim);
  return plan;
}

// Parts of the workspace one behind the other, each aligned as copies by TMA need it, and more.
ScratchOffsets lay_out(const BackwardPlan& plan, std::int64_t heads, std::int64_t walks) {
  ScratchOffsets at;
  const auto tiles = static_cast<std::size_t>(plan.query_tiles * heads);
  const auto tile_rows = static_cast<std::size_t>(plan.tile_q);
  const auto dim = static_cast<std::size_t>(plan.dim);
  const std::size_t sums = plan.wraps ? 2 : 1;
  constexpr std::size_t kAlignment = 256;
  const auto take = [&](std::size_t& offset, std::size_t bytes) {
    offset = at.bytes;
    at.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  const auto take_counters = [&](std::size_t& offset, std::size_t count) {
    take(offset, count * sizeof(std::int32_t));
  };
  take_counters(at.taken, static_cast<std::size_t>(std::max<std::int64_t>(plan.launches(), 1)));
  take_counters(at.prepared, 1);
  take_counters(at.finished, 1);
  take_counters(at.ready, static_cast<std::size_t>(walks));
  take_counters(at.counts, sums * tiles);
  at.counters = at.taken;
  at.counter_bytes = at.bytes - at.counters;
  take(at.q, tiles * tile_rows * dim * 2);
  take(at.d_out, tiles * tile_rows * dim * 2);
  take(at.numbers, tiles * static_cast<std::size_t>(tile_number_words(plan.tile_q, plan.d_copies)) * sizeof(float));
  take(at.sums, sums * tiles * tile_rows * dim * sizeof(float));
  take(at.mask_words, static_cast<std::size_t>(plan.mask.count()) * tile::kMaskTilesOfBlock * tile::kMaskWordsOfTile *
                          sizeof(std::uint32_t));
  return at;
}

MaskBlocks mask_blocks_of(const ConstTensorView& allowed, const core::Geometry& geometry) {
  if (!allowed.present()) return {};
  return {allowed.extent(0), allowed.extent(1), tile::divide_up(allowed.extent(2), tile::kMaskTileQueries),
          tile::divide_up(std::min(geometry.n_k, kMaskColumns), tile::kBlockKeys)};
}

// Runs of four keys are copied, 8 bytes each: keys are neighbours wherever groups are interleaved.
bool copies_bias(const Problem& problem) {
  const ConstTensorView& bias = problem.mask.bias;
  if (!bias.present() || size_bytes(bias.dtype) != 2 || problem.grouping != Grouping::interleaved) return false;
  const auto aligned = [&](int dim) { return bias.extent(dim) == 1 || bias.step(dim) % 4 == 0; };
  return bias.extent(3) > 1 && bias.step(3) == 1 && aligned(0) && aligned(1) && aligned(2) &&
         reinterpret_cast<std::uintptr_t>(bias.data) % 8 == 0;
}

// In which order items are taken, and where walks begin. Heads come in turn, so that the neighbours of a head are begun
// apart: CTAs work on `group` heads at a time.
void order_items(BackwardPlan& plan, const core::Geometry& geometry, std::int64_t tiles, bool has_diagonal) {
  const std::int64_t heads = std::max<std::int64_t>(geometry.batch * geometry.kv_heads, 1);
  // As many heads as a third of the L2 cache holds the query tiles and sums of: of every element Q and dO in 16 bits,
  // dQ in 32. K, V and their gradients, and what is written ahead, need the rest (docs/log/backward.md: with twice as
  // many heads everything at d >= 128 is 3 to 12 % slower).
  constexpr std::int64_t kCacheBytes = std::int64_t{17} << 20;
  const std::int64_t head_bytes =
      geometry.n_q * plan.dim * 8 * (geometry.heads / std::max<std::int64_t>(geometry.kv_heads, 1));
  const std::int64_t cached = kCacheBytes / std::max<std::int64_t>(head_bytes, 1);
  if (has_diagonal) {
    // Walks begin at different tiles, but differ in length, so that a head's CTAs drift: two heads at least, and no
    // more than a wave of CTAs works on, twice over.
    const std::int64_t wave = tile::divide_up(plan.ctas, std::max<std::int64_t>(plan.launch_tiles, 1));
    plan.head_group =
        static_cast<int>(std::min(std::clamp<std::int64_t>(cached, 2, std::max<std::int64_t>(2 * wave, 2)), heads));
    plan.last_ascends = plan.items > plan.ctas && plan.launches() == 1;  // first keys first: not with others before
    return;
  }
  const std::int64_t group = std::clamp<std::int64_t>(cached, 1, heads);
  // All walks may begin at the first query tile: of a head's CTAs each waits for the one before, once, and from then on
  // for whatever delays that one. Where that are many, walks go around; but then there is a second sum, written and
  // read for every query tile.
  constexpr std::int64_t kMostInStep = 8;
  const std::int64_t in_step = std::min<std::int64_t>(tile::divide_up(plan.ctas, group), plan.launch_tiles);
  plan.wraps = tiles > 1 && (in_step > kMostInStep || in_step * plan.ctas > plan.query_tiles * geometry.heads);
  plan.head_group = plan.wraps ? 1 : static_cast<int>(group);
}

// The kernels over rows run beside the main one. Theirs is the same work however many keys there are: short problems
// leave more multiprocessors to finish_d_q, and have their query tiles written at memory's speed. By measurement
// (docs/log/backward.md).
void share_multiprocessors(BackwardPlan& plan, const core::Geometry& geometry, int multiprocessors) {
  constexpr std::int64_t kShortKeys = 2048;
  const bool is_short = geometry.n_k <= kShortKeys;
  const int spare = multiprocessors / (is_short ? 32 : 64);  // 4 or 2 of an H200's 132
  plan.ctas = std::min(plan.ctas, multiprocessors - spare);
  plan.prepare_ctas = std::max(is_short ? multiprocessors : multiprocessors * 8 / 33, 1);  // 132 or 32
  plan.finish_ctas = std::max(4 * multiprocessors, 1);  // as many as are resident at once
}

}  // namespace

BackwardPlan plan_backward(const BackwardKernel& kernel, const Problem& problem, const DeviceFacts& device) {
  const core::Geometry geometry = core::geometry_of(problem);
  BackwardPlan plan =
      tile::at_head_dim<tile::kBackwardHeadDims>(kernel.dim, []<int kDim> { return plan_from<kDim>(); });
  const std::int64_t tiles = tile::divide_up(geometry.n_q, plan.tile_q);
  plan.query_tiles = problem.packed ? problem.q.extent(2) / plan.tile_q + geometry.batch + 1 : geometry.batch * tiles;
  const int parts = tile::kBlockKeys / plan.keys;
  plan.key_tiles = std::int64_t{parts} * tile::divide_up(geometry.n_k, tile::kBlockKeys);
  plan.mask = mask_blocks_of(problem.mask.allowed, geometry);
  plan.launch_tiles = plan.mask.count() > 0 ? std::min(plan.key_tiles, parts * plan.mask.key_blocks) : plan.key_tiles;
  plan.items = plan.key_tiles * geometry.batch * geometry.kv_heads;
  const std::int64_t launch_items = plan.launch_tiles * geometry.batch * geometry.kv_heads;
  plan.ctas = static_cast<int>(std::min<std::int64_t>(launch_items, device.multiprocessors));
  order_items(plan, geometry, tiles, tile::clamped_reach(core::band_of(problem.mask).right) < tile::kMaxRows);
  share_multiprocessors(plan, geometry, device.multiprocessors);
  plan.bias_copied = plan.bias_copied && copies_bias(problem);
  plan.scratch = lay_out(plan, geometry.heads, geometry.batch * geometry.kv_heads);
  return plan;
}

std::string to_string(const BackwardPlan& plan) {
  std::ostringstream text;
  text << "CTA         " << plan.keys << " keys, query tiles of " << plan.tile_q << ", compiled for d = " << plan.dim
       << ", 2 key warpgroups, " << plan.stages << " stages"
       << "\nitems       " << plan.items << ", the last keys of a head first"
       << (plan.head_group > 1 ? ", of " + std::to_string(plan.head_group) + " heads in turn" : "")
       << (plan.last_ascends ? ", of the last of these the first keys first" : "")
       << "\ndQ          shares added in a fixed order, "
       << (plan.wraps ? "two sums: walks begin at their own place and go around" : "one sum") << "\nlaunch      "
       << plan.ctas << " CTAs of " << plan.threads << " threads, beside " << plan.prepare_ctas
       << " that write query tiles\nworkspace   " << plan.scratch.bytes << " bytes";
  if (plan.mask.count() > 0) text << "\nmask        as bits, " << plan.mask.count() << " blocks of 64 x 128";
  if (plan.launches() > 1) text << " at a time: " << plan.launches() << " launches";
  if (plan.bias_copied) text << "\nbias        by way of shared memory";
  return text.str();
}

}  // namespace dspattn::cuda::sm90::backward
