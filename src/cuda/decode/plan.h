// How few queries are served, and whether they are few: pure functions of the problem and the device, printed by
// `dspattn kernels`.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/geometry.h"
#include "cuda/decode/config.h"
#include "cuda/device/facts.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::decode {

inline constexpr int kMostOfLastCta = 1024;  // numbers that the last CTA joins: four a thread of eight warps

struct Plan {
  int dim = 0;        // head dim the kernel is compiled for
  int rows = 0;       // of a unit
  int row_tiles = 1;  // units of a key head
  Teams teams;
  std::int64_t units = 0;  // (sequence, key head, tile of rows)
  int tiles = 0;           // of keys that a unit has at most
  int splits = 1;          // CTAs of a unit
  int cluster = 1;         // of those, CTAs that join their results in shared memory
  int ctas_per_multiprocessor = 1;
  SharedLayout layout;
  // Where things lie in the workspace: partial results, their stats; scores and stats of heads that choose together.
  std::size_t stats_offset = 0, scores_offset = 0, whole_offset = 0, arrived_offset = 0;
  std::size_t workspace_bytes = 0;

  std::int64_t ctas() const { return units * splits; }
  // The last of a unit's CTAs joins their results, or where these are more than it does soon a second kernel.
  bool joins_last() const { return splits > cluster && rows * dim <= kMostOfLastCta; }
  bool merges() const { return splits > cluster && !joins_last(); }
};

// Of a row of partial results.
constexpr int partial_columns(std::int64_t d_v) { return static_cast<int>((d_v + 3) / 4 * 4); }

// Query rows of a key head: those of all heads that share it, side by side.
std::int64_t rows_of_key_head(const core::Geometry& geometry);

// Clusters of so many CTAs, each of which fills a multiprocessor, that a device has room for at once, as its driver
// says (room.cu). Cards of a kind differ, since not the same of their multiprocessors are in use. 0: nobody asked;
// negative: none.
struct ClusterRoom {
  std::array<int, kMaxCluster + 1> clusters{};
};

// Of a problem that is not empty and that the kernel serves.
Plan plan_of(int dim, const Problem& problem, const DeviceFacts& device, const ClusterRoom& room = {});
std::string to_string(const Plan& plan);

// CTAs that a device has room for at once, of clusters of `cluster`, so many a multiprocessor. A cluster lies within
// one of the groups of 16 or 18 multiprocessors, or fewer.
std::int64_t slots_of(const DeviceFacts& device, int cluster, int ctas_per_multiprocessor,
                      const ClusterRoom& room = {});

// A kernel made for long query sequences is the faster one, where it serves the problem.
bool yields(const Problem& problem, const DeviceFacts& device);

// Thresholds of yields().
inline constexpr std::int64_t kLeastKeys = 512;  // with fewer, a CTA's loads hardly overlap
inline constexpr std::int64_t kFewRows = 32;     // more read K and V from shared memory four times

}  // namespace dspattn::cuda::decode
