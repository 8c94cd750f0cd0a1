// The theory's experiments: draw scores, softmax them, prune them, add up; walk the tiles and count what they load.
//
// Nothing here uses the closed forms of theory.h: no normal distribution function, no quadrature, no traffic formula.
// An estimate carries the standard error computed from its own sample; the same seed gives the same numbers.
#pragma once

#include <cstdint>
#include <span>

#include "dspattn/pattern.h"
#include "dspattn/theory.h"

namespace dspattn::theory {

struct Estimate {
  double mean = 0;
  double standard_error = 0;
  std::int64_t samples = 0;
};

// Which entries of a row stay.
struct Selection {
  enum class Kind : std::uint8_t { nm, topk, fixed };
  Kind kind = Kind::nm;
  Pattern pattern{};                          // nm
  Grouping grouping = Grouping::consecutive;  // nm
  double density = 0.5;                       // topk and fixed: round(density * keys) entries, at least one

  static Selection nm(Pattern pattern, Grouping grouping = Grouping::consecutive) {
    return {.kind = Kind::nm, .pattern = pattern, .grouping = grouping};
  }
  static Selection topk(double density) { return {.kind = Kind::topk, .density = density}; }
  // A fixed pattern: entries spread evenly over the row, chosen before the scores are seen.
  static Selection fixed(double density) { return {.kind = Kind::fixed, .density = density}; }
};

enum class Average : std::uint8_t {
  ratio,  // mean over rows of kept/all: the definition of Q^p
  means,  // mean kept over mean all: what the ratio tends to for long rows (standard error by the delta method)
};

// Rows of Gaussian scores of deviation sigma. autocorrelation[lag] correlates keys `lag` apart (beyond its end 0;
// empty: independent); it must belong to a process, i.e. its Toeplitz matrix over `keys` must be positive definite.
struct RowModel {
  double p = 1;
  double sigma = 1;
  std::int64_t keys = 1024;
  std::span<const double> autocorrelation = {};
};

Estimate simulate_quality(const Selection& selection, const RowModel& model, Average average, std::int64_t rows,
                          std::uint64_t seed);
// E[exp(p (mu + sigma z))].
Estimate simulate_mean_power(double p, double mu, double sigma, std::int64_t samples, std::uint64_t seed);

// Squared error of the pruned kernel at one (q, k), over random other keys of the group; vectors of d entries are
// drawn.
Estimate simulate_nm_kernel_mse(Pattern pattern, const KernelPoint& point, std::int64_t samples, std::uint64_t seed);
// The same for Performer's positive features, drawn anew for every sample.
enum class Features : std::uint8_t { independent, orthogonal };
Estimate simulate_performer_mse(const KernelPoint& point, std::int64_t features, Features kind, std::int64_t samples,
                                std::uint64_t seed);

// Traffic counted by walking the tiles of every product. Whole tiles only: an operand that meets a single output tile
// is read once, where the formulas of the paper, dividing by T, would have it read d/T < 1 times (d < T).
Traffic count_full_traffic(const Shape& shape);
Traffic count_topk_traffic(const Shape& shape, std::int64_t kept_per_row);
Traffic count_fixed_traffic(const Shape& shape, std::int64_t kept_columns, FixedReads reads);
Traffic count_nm_traffic(const Shape& shape, Pattern pattern, int element_bits = 16);
Traffic count_performer_traffic(const Shape& shape, std::int64_t features);
Traffic count_nystrom_traffic(const NystromShape& shape, Pattern pattern, int element_bits = 16);
Traffic count_linformer_traffic(const LinformerShape& shape, Pattern pattern, int element_bits = 16);
// Blocks of tile x tile; kept[row * columns + column] says whether a block is computed. Blocks are whole: keys must be
// a multiple of the tile.
Traffic count_block_sparse_traffic(const Shape& shape, std::span<const bool> kept, Pattern pattern,
                                   int element_bits = 16);

// Nystromformer by doing: F, A+ and B are made with their nonzeros in place, (F A+)(B V) is multiplied out entry by
// entry, and every product and every stored value is counted. Keys and landmarks must be multiples of the group.
struct NystromCount {
  std::int64_t products = 0;       // multiplications by stored values
  std::int64_t stored_values = 0;  // landmarks of Q, F, B, A+ and the output; metadata is not a value
};
NystromCount count_nystrom(const NystromShape& shape, Pattern pattern);

}  // namespace dspattn::theory
