#include "cuda/decode/plan.h"

#include <algorithm>
#include <sstream>

#include "cuda/tile/walk.h"

namespace dspattn::cuda::decode {
namespace {

// What a CTA costs beside its tiles, in tiles of a team: Q, the first tile's latency, joining the teams.
constexpr std::int64_t kTilesOfACta = 3;
// And what merging costs: a second kernel.
constexpr std::int64_t kTilesOfMerging = 2;

// Tiles that some row of a sequence may see: of windows, wherever they stand.
int most_tiles(const Problem& problem, const core::Geometry& geometry, int keys_of_tile) {
  const core::Band band = core::band_of(problem.mask);
  std::int64_t keys = geometry.n_k;
  if (band.left < geometry.n_k && band.right < geometry.n_k) {
    keys = std::clamp<std::int64_t>(band.left + band.right + geometry.n_q, 0, keys);
  }
  const std::int64_t blocks = std::min<std::int64_t>(tile::divide_up(geometry.n_k, tile::kBlockKeys),
                                                     tile::divide_up(keys, tile::kBlockKeys) + (keys < geometry.n_k));
  return static_cast<int>(blocks) * (tile::kBlockKeys / keys_of_tile);
}

// A power of two that is not below.
int rounded_up(std::int64_t x) {
  int power = 1;
  while (power < x) power *= 2;
  return power;
}

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

std::int64_t rows_of_key_head(const core::Geometry& geometry) {
  return geometry.kv_heads == 0 ? 0 : geometry.n_q * (geometry.heads / geometry.kv_heads);
}

int choose_splits(std::int64_t units, int tiles, int teams, std::int64_t slots) {
  const std::int64_t most = std::max<std::int64_t>(1, tile::divide_up(tiles, teams));
  const auto cost = [&](std::int64_t splits) {
    const std::int64_t rounds = (units * splits + slots - 1) / slots;
    const std::int64_t own = tile::divide_up(tile::divide_up(tiles, splits), teams);
    return rounds * (own + kTilesOfACta) + (splits > 1 ? kTilesOfMerging : 0);
  };
  // The most that a number of rounds has room for; more rounds even out what the last one leaves idle.
  std::int64_t best = 1;
  for (std::int64_t rounds = 1; rounds <= 4; ++rounds) {
    const std::int64_t splits = std::min(most, rounds * slots / units);
    if (splits >= 1 && cost(splits) < cost(best)) best = splits;
  }
  return static_cast<int>(best);
}

Plan plan_of(int dim, const Problem& problem, const DeviceFacts& device) {
  const core::Geometry geometry = core::geometry_of(problem);
  const DType type = problem.q.dtype;
  Plan plan;
  plan.dim = dim;
  plan.rows = static_cast<int>(rows_of_key_head(geometry));
  plan.teams.warps = rounded_up(tile::divide_up(plan.rows, kWarpRows));
  plan.teams.rows = rounded_up(std::min(plan.rows, kWarpRows));
  plan.together = problem.choice == Choice::shared;
  plan.teams.gather = plan.rows == 1 || (plan.together && geometry.n_q == 1) ? 1 : 0;
  // Where shared memory is short, larger teams have fewer rings, though some of their warps have no rows.
  const auto fits = [&] { return shared_layout(type, dim, plan.teams).bytes <= device.shared_bytes; };
  while (!fits() && plan.teams.warps < kWarps) plan.teams.warps *= 2;
  plan.layout = shared_layout(type, dim, plan.teams);
  plan.units = geometry.batch * geometry.kv_heads;
  plan.tiles = most_tiles(problem, geometry, tile_keys(type, dim));
  constexpr int kReserved = 1024;  // of a multiprocessor's shared memory, by every CTA
  plan.ctas_per_multiprocessor =
      std::clamp((device.shared_bytes + kReserved) / (plan.layout.bytes + kReserved), 1, ctas_by_registers(type, dim));
  plan.splits = choose_splits(plan.units, plan.tiles, kWarps / plan.teams.warps,
                              std::int64_t{device.multiprocessors} * plan.ctas_per_multiprocessor);
  if (plan.splits > 1) {
    const auto rows = static_cast<std::size_t>(plan.ctas()) * static_cast<std::size_t>(plan.rows);
    plan.stats_offset = aligned(rows * static_cast<std::size_t>(geometry.d_v) * sizeof(float));
    plan.workspace_bytes = plan.stats_offset + aligned(rows * 2 * sizeof(float));
  }
  if (plan.together) {
    Teams choice = plan.teams;
    for (choice.batch = kChoiceTiles; choice.batch > 1; choice.batch /= 2) {
      if (shared_layout(type, dim, choice).bytes <= device.shared_bytes) break;
    }
    plan.choice_tiles = choice.batch;
    const auto rows = static_cast<std::size_t>(plan.units) * static_cast<std::size_t>(plan.rows);
    const auto blocks = static_cast<std::size_t>(tile::divide_up(geometry.n_k, tile::kBlockKeys));
    plan.scores_offset = plan.workspace_bytes;
    plan.whole_offset = plan.scores_offset + aligned(rows * blocks * tile::kBlockKeys * sizeof(float));
    plan.workspace_bytes =
        plan.whole_offset + aligned(rows * static_cast<std::size_t>(plan.splits) * 2 * sizeof(float));
  }
  return plan;
}

std::string to_string(const Plan& plan) {
  std::ostringstream text;
  text << "rows        " << plan.rows << " of a key head, by " << plan.teams.warps
       << (plan.teams.warps == 1 ? " warp of " : " warps of ") << plan.teams.rows << ", compiled for d = " << plan.dim
       << "\nV           " << (plan.teams.gather != 0 ? "kept rows alone" : "all rows")
       << (plan.together ? ", chosen by all heads together, after all scores" : "") << "\nkeys        up to "
       << plan.tiles << " tiles, split over " << plan.splits << (plan.splits == 1 ? " CTA of " : " CTAs of ")
       << kWarps / plan.teams.warps << (plan.teams.warps == kWarps ? " team" : " teams") << "\nlaunch      "
       << plan.ctas() << " CTAs of " << kThreads << " threads, " << plan.layout.bytes << " bytes of shared memory, "
       << plan.ctas_per_multiprocessor << " a multiprocessor" << (plan.splits > 1 ? ", then a merge" : "")
       << "\nworkspace   " << plan.workspace_bytes << " bytes";
  return text.str();
}

bool yields(const Problem& problem, const DeviceFacts& device) {
  const core::Geometry geometry = core::geometry_of(problem);
  if (device.major != 9) return false;
  if (geometry.batch * geometry.heads < device.multiprocessors && geometry.n_k >= 2 * tile::kBlockKeys) return false;
  return geometry.n_k < kLeastKeys || rows_of_key_head(geometry) > kFewRows;
}

}  // namespace dspattn::cuda::decode
