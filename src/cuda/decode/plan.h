// How few queries are served, and whether they are few: pure functions of the problem and the device, printed by
// `dspattn kernels`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/geometry.h"
#include "cuda/decode/config.h"
#include "cuda/device/facts.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::decode {

struct Plan {
  int dim = 0;   // head dim the kernel is compiled for
  int rows = 0;  // of a key head
  Teams teams;
  std::int64_t units = 0;  // (sequence, key head)
  int tiles = 0;           // of keys that a unit has at most
  int splits = 1;          // CTAs of a unit
  int ctas_per_multiprocessor = 1;
  SharedLayout layout;
  // Where things lie in the workspace: partial results, their stats; where heads choose together, scores and stats.
  std::size_t stats_offset = 0, scores_offset = 0, whole_offset = 0;
  bool together = false;
  int choice_tiles = 0;  // of a batch, where heads choose together
  std::size_t workspace_bytes = 0;

  std::int64_t ctas() const { return units * splits; }
};

// Query rows of a key head: those of all heads that share it, side by side.
std::int64_t rows_of_key_head(const core::Geometry& geometry);

// CTAs of a unit: as many as fill the device in the fewest rounds, and no more than there are tiles to deal out.
int choose_splits(std::int64_t units, int tiles, int teams, std::int64_t slots);

// Of a problem that is not empty and that the kernel serves.
Plan plan_of(int dim, const Problem& problem, const DeviceFacts& device);
std::string to_string(const Plan& plan);

// A kernel made for long query sequences is the faster one, where it serves the problem.
bool yields(const Problem& problem, const DeviceFacts& device);

// Thresholds of yields().
inline constexpr std::int64_t kLeastKeys = 512;  // with fewer, a CTA's loads hardly overlap
inline constexpr std::int64_t kFewRows = 16;     // one warp's: K and V are read from shared memory once

}  // namespace dspattn::cuda::decode
