#include "cuda/decode/plan.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "cuda/tile/walk.h"

namespace dspattn::cuda::decode {
namespace {

// Estimates in cycles, from times of one query of 32 heads on an H200 (docs/log/decode.md), to compare plans with.
constexpr std::int64_t kCardTileCycles = 800;  // of a tile of K and V, 16 KiB, at a multiprocessor's share of the rate
constexpr std::int64_t kTileCycles = 500;      // at the most that a multiprocessor reads
constexpr std::int64_t kTileLatency = 1500;    // of a team's tile, whose K and V are on their way
constexpr std::int64_t kTogetherLatency = 3300;  // of one whose scores stay until all heads choose
constexpr std::int64_t kCtaCycles = 3000;        // of a CTA beside its tiles: Q, the first tile's latency, joining
constexpr std::int64_t kLaterCtaCycles = 1500;   // of one that begins while another computes
constexpr std::int64_t kClusterCycles = 400;     // joining a cluster's results, and for each of its CTAs,
constexpr std::int64_t kClusterCtaCycles = 500;  // of few rows
constexpr std::int64_t kMergeCycles = 7500;      // a second kernel, and for each part that it joins
constexpr std::int64_t kMergePartCycles = 150;
constexpr std::int64_t kTellingCycles = 1500;  // CTAs that are no cluster tell each other: fitted to the log
constexpr std::int64_t kChoiceCycles = 20000;  // a kernel for scores before the one that chooses
// Idle multiprocessors: with 64 of 132 at work the card reads 15 to 30 percent less, with 120 of them 3 percent.
constexpr double kIdleLoss = 0.4;
constexpr int kReserved = 1024;  // of a multiprocessor's shared memory, by every CTA

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

std::int64_t slots_of(const DeviceFacts& device, int cluster, int ctas_per_multiprocessor, const ClusterRoom& room) {
  constexpr int kPair = 2;  // multiprocessors that share a cluster of two, always
  const int known = room.clusters[static_cast<std::size_t>(cluster)];
  if (known < 0) return 0;
  if (ctas_per_multiprocessor == 1 && known > 0) return std::int64_t{known} * cluster;
  if (cluster <= kPair || device.multiprocessors < kMaxCluster) {
    return std::int64_t{device.multiprocessors} * ctas_per_multiprocessor / cluster * cluster;
  }
  // Larger ones lie in neighbourhoods of 8 or 16, of which a card has one less than it has multiprocessors for.
  const int neighbours = cluster <= kPortableCluster ? kPortableCluster : kMaxCluster;
  const int fitting = neighbours * ctas_per_multiprocessor / cluster * cluster;
  return std::int64_t{device.multiprocessors / neighbours - 1} * fitting;
}

namespace {

// A way to deal a unit's keys out.
struct Deal {
  Teams teams;
  int splits = 1, cluster = 1;
  int ctas_per_multiprocessor = 1;
  std::int64_t cost = std::numeric_limits<std::int64_t>::max();
};

class Dealer {
 public:
  Dealer(DType type, int dim, const Teams& teams, std::int64_t units, int tiles, const DeviceFacts& device,
         const ClusterRoom& room)
      : type_(type), dim_(dim), teams_(teams), units_(units), tiles_(tiles), device_(device), room_(room) {}

  // stay: scores of heads that choose together stay in the shared memory of one cluster. A cost of the largest number:
  // there is no way.
  Deal best(bool stay) const {
    Deal found;
    // CTAs that share a multiprocessor overlap one's gathering with another's scores. Where all of V is read, one's end
    // with another's loads, if there are several after each other.
    for (const int packed : {1, 2}) {
      if (packed > 1 && teams_.gather == 0 && units_ < 2 * slots_of(device_, 1, 1)) continue;
      const int most = most_teams(packed, stay);
      if (most == 0) continue;
      const auto consider = [&](std::int64_t splits, std::int64_t cluster) {
        const Deal deal = deal_of(packed, most, static_cast<int>(splits), static_cast<int>(cluster), stay);
        if (deal.cost < found.cost) found = deal;
      };
      for (int splits = 1; splits <= std::min(kMaxCluster, std::max(tiles_, 1)); ++splits) {
        if (!stay || splits == 1) consider(splits, 1);
        if (device_.major >= 9 && splits > 1) consider(splits, splits);
      }
      if (stay && packed == 1) consider_spread(most, found);
      if (stay) continue;
      // Beyond a cluster: the most that a number of rounds has room for.
      for (int rounds = 1; rounds <= 4; ++rounds) {
        const std::int64_t splits = std::min<std::int64_t>(tiles_, rounds * slots_of(device_, 1, packed) / units_);
        if (splits > kMaxCluster) consider(splits, 1);
      }
    }
    return found;
  }

 private:
  // Scores stay, and all CTAs of all units have a multiprocessor at once.
  void consider_spread(int most, Deal& found) const {
    const std::int64_t splits = std::min<std::int64_t>(tiles_, slots_of(device_, 1, 1) / units_);
    if (device_.major < 9 || splits < 2) return;
    const Deal deal = deal_of(1, most, static_cast<int>(splits), 1, true);
    if (deal.cost < found.cost) found = deal;
  }
  bool fits(const Teams& teams, int packed) const {
    return packed * (shared_layout(type_, dim_, teams).bytes + kReserved) <= device_.shared_bytes + kReserved;
  }
  // Of a CTA, where so many share a multiprocessor, without scores that stay.
  int most_teams(int packed, bool stay) const {
    Teams teams = teams_;
    const bool chosen = teams.chosen != 0;
    // Registers are enough for kMaxWarps of a multiprocessor.
    for (teams.count = kMaxWarps / packed / teams.warps; teams.count > 0; --teams.count) {
      if (stay) {  // of one tile a team at least
        teams.stay = 1;
        if (fits(teams, packed)) break;
        continue;
      }
      Teams scoring = teams;  // before a choice
      scoring.chosen = scoring.gather = scoring.lanes = 0;
      scoring.scoring = 1;
      if (fits(teams, packed) && (!chosen || fits(scoring, packed))) break;
    }
    return teams.count;
  }
  Deal deal_of(int packed, int most, int splits, int cluster, bool stay) const {
    Deal deal;
    deal.teams = teams_;
    const int tiles_of_cta = tile::divide_up(tiles_, splits);
    deal.teams.count = std::min(most, std::max(tiles_of_cta, 1));
    deal.teams.cluster = cluster;
    deal.teams.spread = stay && splits > cluster ? 1 : 0;
    for (; deal.teams.count > 0; --deal.teams.count) {
      if (stay) deal.teams.stay = std::max(tile::divide_up(tiles_of_cta, deal.teams.count), 1);
      if (fits(deal.teams, packed)) break;
    }
    if (deal.teams.count == 0) return deal;
    deal.splits = splits;
    deal.cluster = cluster;
    deal.ctas_per_multiprocessor = packed;
    const std::int64_t slots = slots_of(device_, cluster, packed, room_);
    if (slots == 0) return deal;
    const std::int64_t rounds = (units_ * splits + slots - 1) / slots;
    const std::int64_t own = tile::divide_up(tiles_of_cta, deal.teams.count);
    // Of a tile of V half is read where all rows keep the same.
    const auto read = [&](std::int64_t cycles) { return teams_.gather != 0 ? cycles * 3 / 4 : cycles; };
    const std::int64_t of_cta = std::max(own * (stay ? kTogetherLatency : kTileLatency),
                                         read(std::int64_t{tiles_of_cta} * packed * kTileCycles));
    const std::int64_t all = std::max(device_.multiprocessors, 1);
    const std::int64_t idle = all - std::min(all, units_ * splits / (rounds * packed));
    const std::int64_t busy = read(units_ * tiles_ * kCardTileCycles) / all;
    const auto of_card = static_cast<std::int64_t>(
        static_cast<double>(busy) * (1 + kIdleLoss * static_cast<double>(idle) / static_cast<double>(all)));
    const int rows = teams_.warps * teams_.rows;
    const auto joining = [&]() -> std::int64_t {
      if (splits == 1) return 0;
      if (cluster > 1) return (kClusterCycles + cluster * kClusterCtaCycles) * (kWarpRows + rows) / kWarpRows;
      return kMergeCycles + splits * kMergePartCycles + (deal.teams.spread != 0 ? kTellingCycles : 0);
    };
    deal.cost = std::max(rounds * of_cta, of_card) + kCtaCycles +
                (rounds - 1) * (packed > 1 ? kLaterCtaCycles : kCtaCycles) + joining();
    return deal;
  }

  DType type_;
  int dim_;
  Teams teams_;
  std::int64_t units_;
  int tiles_;
  const DeviceFacts& device_;
  const ClusterRoom& room_;
};

}  // namespace

Plan plan_of(int dim, const Problem& problem, const DeviceFacts& device, const ClusterRoom& room) {
  const core::Geometry geometry = core::geometry_of(problem);
  const DType type = problem.q.dtype;
  Plan plan;
  plan.dim = dim;
  plan.rows = static_cast<int>(std::min<std::int64_t>(rows_of_key_head(geometry), kMaxRows));
  plan.row_tiles = tile::divide_up(rows_of_key_head(geometry), kMaxRows);
  plan.units = geometry.batch * geometry.kv_heads * plan.row_tiles;
  plan.tiles = most_tiles(problem, geometry, tile_keys(type, dim));
  Teams teams;
  teams.warps = rounded_up(tile::divide_up(plan.rows, kWarpRows));
  teams.rows = rounded_up(std::min(plan.rows, kWarpRows));
  teams.chosen = problem.choice == Choice::shared ? 1 : 0;
  teams.gather = plan.rows == 1 || (teams.chosen != 0 && geometry.n_q == 1) ? 1 : 0;
  if (teams.chosen != 0 && geometry.n_q == 1 && plan.rows <= kRowsOfLanes) {
    teams.lanes = 1;
    teams.rows = std::max(teams.rows, kRowsOfLanes / 2);
  }
  const Dealer dealer(type, dim, teams, plan.units, plan.tiles, device, room);
  Deal deal = dealer.best(false);
  if (teams.chosen != 0) {
    // In one kernel, whose clusters may leave multiprocessors idle, or in two.
    const Deal stays = teams.lanes != 0 ? dealer.best(true) : Deal{};
    if (stays.cost < deal.cost + kChoiceCycles) deal = stays;
  }
  plan.teams = deal.teams;
  plan.splits = deal.splits;
  plan.cluster = deal.cluster;
  plan.ctas_per_multiprocessor = deal.ctas_per_multiprocessor;
  plan.layout = shared_layout(type, dim, plan.teams);
  if (plan.splits > plan.cluster) {
    const auto rows = static_cast<std::size_t>(plan.ctas() / plan.cluster) * static_cast<std::size_t>(plan.rows);
    plan.stats_offset = aligned(rows * static_cast<std::size_t>(partial_columns(geometry.d_v)) * sizeof(float));
    plan.workspace_bytes = plan.stats_offset + aligned(rows * kStatsBytes);
  }
  if (plan.teams.spread != 0) {
    plan.whole_offset = plan.workspace_bytes;
    plan.workspace_bytes += aligned(static_cast<std::size_t>(plan.ctas() * plan.teams.rows * kTaggedBytes));
  }
  if (plan.joins_last()) {
    plan.arrived_offset = plan.workspace_bytes;
    plan.workspace_bytes += aligned(static_cast<std::size_t>(plan.units) * sizeof(std::uint64_t));
  }
  if (plan.teams.chosen != 0 && plan.teams.stay == 0) {
    const auto rows =
        static_cast<std::size_t>(plan.units) * static_cast<std::size_t>(std::max(plan.rows, plan.teams.rows));
    const auto blocks = static_cast<std::size_t>(tile::divide_up(geometry.n_k, tile::kBlockKeys));
    plan.scores_offset = plan.workspace_bytes;
    plan.whole_offset = plan.scores_offset + aligned(rows * blocks * tile::kBlockKeys * sizeof(std::uint16_t));
    const int parts_of_cta = plan.teams.lanes != 0 ? plan.teams.count : 1;
    const auto parts = static_cast<std::size_t>(plan.splits) * static_cast<std::size_t>(parts_of_cta);
    plan.workspace_bytes = plan.whole_offset + aligned(rows * parts * kStatsBytes);
  }
  return plan;
}

std::string to_string(const Plan& plan) {
  std::ostringstream text;
  text << "rows        " << plan.rows << (plan.row_tiles > 1 ? " of a tile, by " : " of a key head, by ")
       << plan.teams.warps << (plan.teams.warps == 1 ? " warp of " : " warps of ") << plan.teams.rows
       << ", compiled for d = " << plan.dim << "\nV           "
       << (plan.teams.gather != 0 ? "kept rows alone" : "all rows")
       << (plan.teams.chosen == 0 ? ""
           : plan.teams.stay != 0 ? ", chosen by all heads together, scores stay in shared memory"
                                  : ", chosen by all heads together, after all scores")
       << "\nkeys        up to " << plan.tiles << " tiles, split over " << plan.splits
       << (plan.splits == 1 ? " CTA of " : " CTAs of ") << plan.teams.count
       << (plan.teams.count == 1 ? " team" : " teams") << "\nlaunch      " << plan.ctas() << " CTAs of "
       << 32 * plan.teams.cta_warps() << " threads";
  if (plan.cluster > 1) text << ", clusters of " << plan.cluster;
  text << ", " << plan.layout.bytes << " bytes of shared memory, " << plan.ctas_per_multiprocessor
       << " a multiprocessor"
       << (plan.merges()       ? ", then a merge"
           : plan.joins_last() ? ", the last of a unit joins"
                               : "")
       << "\nworkspace   " << plan.workspace_bytes << " bytes";
  return text.str();
}

bool yields(const Problem& problem, const DeviceFacts& device) {
  const core::Geometry geometry = core::geometry_of(problem);
  const std::int64_t rows = rows_of_key_head(geometry);
  if (device.major != 9) return rows > kMaxRows;
  if (geometry.batch * geometry.heads < device.multiprocessors && rows <= kMaxRows) {
    return geometry.n_k < (rows <= kWarpRows ? kLeastKeys / 2 : rows <= kFewRows ? 2 * kLeastKeys : 4 * kLeastKeys);
  }
  return geometry.n_k < kLeastKeys || rows > (geometry.d <= 64 ? kMaxRows : kFewRows);
}

}  // namespace dspattn::cuda::decode
