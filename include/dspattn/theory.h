// The paper's theory as functions: what an N:M pattern keeps of a row of attention, and what it saves in memory
// traffic.
//
// Labels in square brackets are those of the paper's LaTeX source (def:ticket_quality, prop:topk_random, ...).
// docs/theory.md derives every formula, says where the printed one has a slip, and compares each with simulation
// (theory_monte_carlo.h). Every function throws dspattn::Error that names the parameter, what was expected, what given.
#pragma once

#include <cstdint>
#include <span>

#include "dspattn/pattern.h"

namespace dspattn::theory {

// ---------------------------------------------------------------------------------------------------------------
// Quality: how much of a row's p-th power mass the kept weights hold.
// ---------------------------------------------------------------------------------------------------------------

// [def:ticket_quality] Q^p of `kept` (0 or 1) on `weights`, both rows x keys, row-major: the mean over rows of
// (sum of kept weights^p) / (sum of weights^p). A row without weight has nothing to lose and is left out of the mean.
double quality(std::span<const double> weights, std::span<const std::uint8_t> kept, std::int64_t keys, double p);
// [def:ticket_quality] s, the share of entries kept.
double density(std::span<const std::uint8_t> kept);

// [equ:3_1_2] E[x^p] of x = exp(mu + sigma z): the row mean that Q^p is normalised by.
double mean_power(double p, double mu, double sigma);

// [prop:topk_random] Long rows of independent N(mu, sigma^2) scores; only p * sigma matters.
double topk_quality(double density, double p, double sigma);
double fixed_quality(double density);
double one_of_two_quality(double p, double sigma);
// The paper's lower bound of 2:4: what two 1:2 pairs keep of the same four scores.
double two_of_four_quality_lower_bound(double p, double sigma);
// Any N:M, exact by quadrature over the order statistics; where the paper stops at a bound for 2:4.
double nm_quality(Pattern pattern, double p, double sigma);

// The same without "n -> infinity": the mean of the ratio over rows of `keys` scores, exact by quadrature. The limit
// above needs keys >> exp((p sigma)^2); below that the largest few scores decide and the limit is far off.
double nm_quality_finite(Pattern pattern, double p, double sigma, std::int64_t keys);
double topk_quality_finite(std::int64_t kept_keys, double p, double sigma, std::int64_t keys);

// Gaussian scores that are correlated along the keys (this project's extension; the paper takes them independent).
// A pair with correlation rho: the difference has deviation sigma sqrt(2 (1 - rho)).
double one_of_two_quality_correlated(double p, double sigma, double rho);
// A group whose members all correlate alike: the common part cancels in every comparison, sigma -> sigma sqrt(1 - rho).
double nm_quality_equicorrelated(Pattern pattern, double p, double sigma, double rho);
// Mean correlation over the pairs of a group; autocorrelation[lag] for lag 0, 1, ... (at least the group's span).
double mean_group_correlation(Pattern pattern, Grouping grouping, std::span<const double> autocorrelation);
// Approximation: the equicorrelated value at the mean pair correlation. Exact for groups of two.
double nm_quality_grouped(Pattern pattern, Grouping grouping, double p, double sigma,
                          std::span<const double> autocorrelation);

// p * sigma above which top-k of this density keeps more than the pattern does ("p sigma < 7" in the paper).
double spread_where_topk_overtakes(Pattern pattern, double density);
// The same for rows of `keys` keys of which top-k keeps `kept_keys`; infinite where it is beyond 30.
double spread_where_topk_overtakes_finite(Pattern pattern, std::int64_t kept_keys, std::int64_t keys);

// ---------------------------------------------------------------------------------------------------------------
// Memory traffic of one head, in elements, products tiled T x T. [tab:density_theory]
// ---------------------------------------------------------------------------------------------------------------

struct Shape {
  std::int64_t keys = 1024;    // n, queries alike
  std::int64_t head_dim = 64;  // d
  std::int64_t tile = 128;     // T
};

struct Traffic {
  double scores = 0;   // Q K^T, read and written
  double softmax = 0;  // scores in, weights out
  double values = 0;   // A V, read and written
  double other = 0;    // steps the three-stage attention does not have (projections, pseudo-inverse, feature maps)

  double total() const { return scores + softmax + values + other; }
};

// What the product A V reads of V under a fixed pattern.
enum class FixedReads : std::uint8_t {
  all_values,   // the paper's count, nd (1 + s) n / T: every value for every tile of queries
  kept_values,  // tiles of V behind dropped tiles of A are skipped, as when columns are truncated: nd 2 s n / T
};

Traffic full_traffic(const Shape& shape);
Traffic topk_traffic(const Shape& shape, double density);
Traffic fixed_traffic(const Shape& shape, double density, FixedReads reads = FixedReads::all_values);
Traffic nm_traffic(const Shape& shape, Pattern pattern, int element_bits = 16);

// Metadata in units of elements per entry of the dense matrix: 1/16 for the hardware's 2:4 and 1:2; otherwise
// `keep` indices of ceil(log2 group) bits per group.
double metadata_fraction(Pattern pattern, int element_bits = 16);
// Bits of the stored weights under the pattern, metadata included, relative to dense (9/16 for 2:4 and 1:2).
double weight_memory_ratio(Pattern pattern, int element_bits = 16);

// Speedups over full attention as n/d grows. [equ:speedup_topk, equ:speedup_fix, equ:speedup_12]
double topk_speedup_bound(std::int64_t head_dim, std::int64_t tile, double density);
double fixed_speedup(std::int64_t head_dim, std::int64_t tile, double density,
                     FixedReads reads = FixedReads::all_values);
double nm_speedup(Pattern pattern, std::int64_t head_dim, std::int64_t tile, int element_bits = 16);

// Densities. Below the first, top-k can win at all; at the others it or a fixed pattern is as fast as N:M.
double topk_density_to_win(std::int64_t head_dim, std::int64_t tile);
double topk_density_matching_nm(Pattern pattern, std::int64_t head_dim, std::int64_t tile, int element_bits = 16);
double fixed_density_matching_nm(Pattern pattern, std::int64_t head_dim, std::int64_t tile,
                                 FixedReads reads = FixedReads::all_values, int element_bits = 16);
// The density the paper prints for the fixed pattern at equal speed, with its fraction upside down: kept to show it.
double fixed_density_matching_nm_as_printed(std::int64_t head_dim, std::int64_t tile);

// ---------------------------------------------------------------------------------------------------------------
// Performer (FAVOR+): kernel estimate, its error against N:M's, its traffic.
// ---------------------------------------------------------------------------------------------------------------

// One query and one key of d entries: what the errors below depend on.
struct KernelPoint {
  double dot = 0;          // q . k
  double query_norm2 = 0;  // |q|^2
  double key_norm2 = 0;    // |k|^2
  std::int64_t head_dim = 64;
};

// SM(q, k) = exp(q . k / sqrt d).
double softmax_kernel(const KernelPoint& point);
// The N:M estimate of scores[element] within its group of raw dots: SM if among the `keep` largest, otherwise 0.
double nm_kernel_estimate(Pattern pattern, std::span<const double> group_dots, int element, std::int64_t head_dim);
// [equ:mse_12 and the line below it] Mean-square error over random other keys ~ N(0, I); for 1:2 the paper's formula.
double nm_kernel_mse(Pattern pattern, const KernelPoint& point);
// m positive features, independent: exact. With orthogonal blocks of at most d features: exact, and the closed bound
// that follows from it. [equ:mse_ours] as printed is no bound (docs/zoo.md); kept to show it.
double performer_mse_independent(const KernelPoint& point, std::int64_t features);
double performer_mse_orthogonal(const KernelPoint& point, std::int64_t features);
double performer_mse_orthogonal_bound(const KernelPoint& point, std::int64_t features);
double performer_mse_bound_as_printed(const KernelPoint& point, std::int64_t features);
// Mean over q, k ~ N(0, I_d) of the error, relative to the mean of SM^2. N:M given |q|: 1 - Q^2 at sigma = |q|/sqrt d.
double nm_relative_mse(Pattern pattern, double sigma);
double performer_relative_mse(std::int64_t head_dim, std::int64_t features);  // needs d > 36 to exist
std::int64_t performer_features(std::int64_t head_dim);                       // m = d ln d, rounded

enum class FeatureMapCount : std::uint8_t {
  as_printed,  // n (m + 3) for exp(T1 - T2 - T3): the n m results are not written
  complete,    // n (2 m + 2): read T1, T2, T3, write n m results
};

// [equ:performer, equ:speedup_performer]
Traffic performer_traffic(const Shape& shape, std::int64_t features,
                          FeatureMapCount count = FeatureMapCount::as_printed);
// Real-valued n at which Performer moves as much as full attention, and as the pattern (`dense`: full attention).
double performer_break_even_keys(Pattern pattern, std::int64_t head_dim, std::int64_t tile, std::int64_t features,
                                 FeatureMapCount count = FeatureMapCount::as_printed, int element_bits = 16);

// ---------------------------------------------------------------------------------------------------------------
// N:M inside other efficient transformers. `dense` gives the host mechanism alone.
// ---------------------------------------------------------------------------------------------------------------

struct NystromShape {
  std::int64_t keys = 4096;
  std::int64_t head_dim = 64;
  std::int64_t tile = 128;
  std::int64_t landmarks = 256;       // m
  int pseudo_inverse_iterations = 6;  // Xiong et al. 2021: each takes four m x m products
};

// Multiply-adds and stored elements as the paper counts them (leading terms of its O()).
double nystrom_products(const NystromShape& shape, Pattern pattern);
double nystrom_memory(const NystromShape& shape, Pattern pattern);
Traffic nystrom_traffic(const NystromShape& shape, Pattern pattern, int element_bits = 16);

struct LinformerShape {
  std::int64_t keys = 4096;
  std::int64_t head_dim = 64;
  std::int64_t tile = 128;
  std::int64_t projected = 256;  // k
};

// Projections E and F pruned beforehand, the scores Q (E K)^T on the fly.
Traffic linformer_traffic(const LinformerShape& shape, Pattern pattern, int element_bits = 16);
// Block-sparse attention (BigBird) of the given block density, N:M inside the blocks that remain.
Traffic block_sparse_traffic(const Shape& shape, double block_density, Pattern pattern, int element_bits = 16);

}  // namespace dspattn::theory
