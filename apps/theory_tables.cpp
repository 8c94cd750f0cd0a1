#include "apps/theory_tables.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>

#include "dspattn/error.h"
#include "dspattn/theory.h"
#include "dspattn/theory_monte_carlo.h"

namespace dspattn::apps {
namespace {

using nlohmann::ordered_json;

std::vector<Pattern> patterns_of(const TheoryOptions& options) {
  std::vector<Pattern> patterns;
  for (const std::string& text : options.patterns) patterns.push_back(parse_pattern(text));
  return patterns;
}

std::int64_t features_of(const TheoryOptions& options) {
  return options.features > 0 ? options.features : theory::performer_features(options.head_dim);
}

void add_estimate(ordered_json& row, const theory::Estimate& estimate) {
  row["monte_carlo"] = estimate.mean;
  row["standard_error"] = estimate.standard_error;
}

// The most keys <= wanted that whole groups fill.
std::int64_t whole_groups(std::int64_t wanted, int group) { return std::max<std::int64_t>(wanted / group, 1) * group; }

ordered_json paper_row(const std::string& quantity, const std::string& printed, double ours, const std::string& note) {
  return {{"quantity", quantity}, {"paper", printed}, {"ours", ours}, {"note", note}};
}

std::vector<double> parse_numbers(const std::string& text, char separator, const std::string& whole) {
  std::vector<double> numbers;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    double value = 0.0;
    const auto [rest, error] = std::from_chars(text.data() + begin, text.data() + end, value);
    if (error != std::errc{} || rest != text.data() + end) {
      throw Error("correlation: expected weight:decay pairs such as 0.3:0.5,0.2:0.95, got \"" + whole + "\"");
    }
    numbers.push_back(value);
    begin = end + 1;
  }
  return numbers;
}

}  // namespace

std::vector<double> parse_correlation(const std::string& text, std::size_t count) {
  std::vector<double> correlation(count, 0.0);
  double total = 0.0;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::vector<double> pair = parse_numbers(text.substr(begin, end - begin), ':', text);
    if (pair.size() != 2 || pair[0] < 0.0 || pair[1] < 0.0 || pair[1] >= 1.0) {
      throw Error("correlation: expected weight:decay with weight >= 0 and decay in [0, 1), got \"" + text + "\"");
    }
    total += pair[0];
    for (std::size_t lag = 1; lag < count; ++lag)
      correlation[lag] += pair[0] * std::pow(pair[1], static_cast<double>(lag));
    begin = end + 1;
  }
  if (total > 1.0) throw Error("correlation: expected weights that sum to at most 1, got \"" + text + "\"");
  if (count > 0) correlation[0] = 1.0;
  return correlation;
}

// Where top-k of the density, in whole keys, overtakes the pattern; never where the row is too short for both to
// differ.
double overtakes_in_rows(Pattern pattern, double density, std::int64_t keys) {
  const std::int64_t whole = whole_groups(keys, pattern.group);
  const std::int64_t kept = std::max<std::int64_t>(1, std::llround(density * static_cast<double>(keys)));
  if (kept * pattern.group >= whole * pattern.keep) return std::numeric_limits<double>::infinity();
  return theory::spread_where_topk_overtakes_finite(pattern, kept, whole);
}

Rows paper_rows(const TheoryOptions& options) {
  const std::int64_t d = options.head_dim;
  const std::int64_t t = options.tile;
  const std::int64_t m = features_of(options);
  const Pattern half{1, 2};
  const double matching = theory::topk_density_matching_nm(half, d, t);
  using theory::FeatureMapCount;
  return {
      paper_row("top-k density to win at all", "< 4.5 %", theory::topk_density_to_win(d, t), "prop:topk_slow"),
      paper_row("speedup of 1:2 and 2:4", "(64d+48T)/(57d+25T)", theory::nm_speedup(half, d, t), "equ:speedup_12"),
      paper_row("top-k density as fast as 1:2", "< 0.02", matching, ""),
      paper_row("p sigma where top-k overtakes 1:2", "7", theory::spread_where_topk_overtakes(half, matching), ""),
      paper_row("it overtakes, rows of --keys", "-", overtakes_in_rows(half, matching, options.keys), "exact"),
      paper_row("Q of 1:2 at p sigma = 7", "0.9999996", theory::one_of_two_quality(7.0, 1.0), "long rows"),
      paper_row("Q of 1:2 at 7, rows of --keys", "-",
                theory::nm_quality_finite(half, 7.0, 1.0, whole_groups(options.keys, 2)), "exact"),
      paper_row("fixed density as fast as 1:2", "0.63", theory::fixed_density_matching_nm(half, d, t), "corrected"),
      paper_row("the same, as printed", "0.63", theory::fixed_density_matching_nm_as_printed(d, t),
                "fraction inverted"),
      paper_row("the same, V skipped with A", "-",
                theory::fixed_density_matching_nm(half, d, t, theory::FixedReads::kept_values), ""),
      paper_row("Q of 1:2 at p sigma = 1", "0.76", theory::one_of_two_quality(1.0, 1.0), "prop:topk_random"),
      paper_row("Q of 2:4 at p sigma = 1", ">= 0.76", theory::nm_quality({2, 4}, 1.0, 1.0), "quadrature"),
      paper_row("Performer features m = d ln d", "266", static_cast<double>(m), ""),
      paper_row("Performer ahead of full from n", "672", theory::performer_break_even_keys(Pattern::dense(), d, t, m),
                "equ:speedup_performer"),
      paper_row("Performer ahead of 1:2 from n", "1002", theory::performer_break_even_keys(half, d, t, m), ""),
      paper_row("ahead of full, phi written", "-",
                theory::performer_break_even_keys(Pattern::dense(), d, t, m, FeatureMapCount::complete), "corrected"),
      paper_row("ahead of 1:2, phi written", "-",
                theory::performer_break_even_keys(half, d, t, m, FeatureMapCount::complete), "corrected"),
      paper_row("weight memory of 1:2, 2:4", "1/2 + 1/16", theory::weight_memory_ratio(half), ""),
  };
}

Rows quality_rows(const TheoryOptions& options) {
  Rows rows;
  std::uint64_t seed = options.seed;
  for (const double sigma : options.sigma) {
    for (const double p : options.p) {
      for (const Pattern pattern : patterns_of(options)) {
        const std::int64_t keys = whole_groups(options.keys, pattern.group);
        ordered_json row{{"rule", to_string(pattern)},
                         {"density", static_cast<double>(pattern.keep) / pattern.group},
                         {"p", p},
                         {"sigma", sigma},
                         {"long_rows", theory::nm_quality(pattern, p, sigma)},
                         {"keys", keys},
                         {"finite_rows", theory::nm_quality_finite(pattern, p, sigma, keys)}};
        if (options.monte_carlo) {
          const theory::RowModel model{.p = p, .sigma = sigma, .keys = keys};
          add_estimate(row, simulate_quality(theory::Selection::nm(pattern), model, theory::Average::ratio,
                                             options.rows, seed++));
        }
        rows.push_back(std::move(row));
      }
      for (const double density : options.density) {
        const auto kept = std::max<std::int64_t>(1, std::llround(density * static_cast<double>(options.keys)));
        for (const bool topk : {true, false}) {
          ordered_json row{{"rule", topk ? "top-k" : "fixed"}, {"density", density}, {"p", p}, {"sigma", sigma}};
          row["long_rows"] = topk ? theory::topk_quality(density, p, sigma) : theory::fixed_quality(density);
          row["keys"] = options.keys;
          row["finite_rows"] =
              topk ? theory::topk_quality_finite(kept, p, sigma, options.keys) : theory::fixed_quality(density);
          if (options.monte_carlo) {
            const theory::RowModel model{.p = p, .sigma = sigma, .keys = options.keys};
            const auto selection = topk ? theory::Selection::topk(density) : theory::Selection::fixed(density);
            add_estimate(row, simulate_quality(selection, model, theory::Average::ratio, options.rows, seed++));
          }
          rows.push_back(std::move(row));
        }
      }
    }
  }
  return rows;
}

Rows grouping_rows(const TheoryOptions& options) {
  Rows rows;
  std::uint64_t seed = options.seed;
  const std::vector<double> correlation = parse_correlation(
      options.correlation, static_cast<std::size_t>(std::max<std::int64_t>(options.keys, kInterleaveBlock)));
  for (const double sigma : options.sigma) {
    for (const double p : options.p) {
      for (const Pattern pattern : patterns_of(options)) {
        for (const Grouping grouping : {Grouping::consecutive, Grouping::interleaved}) {
          const double quality = theory::nm_quality_grouped(pattern, grouping, p, sigma, correlation);
          ordered_json row{{"rule", to_string(pattern) + " " + to_string(grouping)},
                           {"p", p},
                           {"sigma", sigma},
                           {"mean_correlation", theory::mean_group_correlation(pattern, grouping, correlation)},
                           {"closed_form", quality},
                           {"independent", theory::nm_quality(pattern, p, sigma)}};
          if (options.monte_carlo) {
            const theory::RowModel model{.p = p, .sigma = sigma, .keys = options.keys, .autocorrelation = correlation};
            row["keys"] = options.keys;
            add_estimate(row, simulate_quality(theory::Selection::nm(pattern, grouping), model, theory::Average::ratio,
                                               options.rows, seed++));
          }
          rows.push_back(std::move(row));
        }
      }
    }
  }
  return rows;
}

Rows speed_rows(const TheoryOptions& options) {
  const theory::Shape shape{.keys = options.keys, .head_dim = options.head_dim, .tile = options.tile};
  const double full = theory::full_traffic(shape).total();
  const double full_counted = theory::count_full_traffic(shape).total();
  Rows rows;
  const auto add = [&](const std::string& rule, double density, const theory::Traffic& traffic, double limit,
                       double counted) {
    rows.push_back({{"rule", rule},
                    {"density", density},
                    {"scores", traffic.scores},
                    {"softmax", traffic.softmax},
                    {"values", traffic.values},
                    {"other", traffic.other},
                    {"speedup", full / traffic.total()},
                    {"speedup_long", limit},
                    {"speedup_counted", full_counted / counted}});
  };
  add("full", 1.0, theory::full_traffic(shape), 1.0, full_counted);
  for (const Pattern pattern : patterns_of(options)) {
    add(to_string(pattern), static_cast<double>(pattern.keep) / pattern.group,
        theory::nm_traffic(shape, pattern, options.element_bits),
        theory::nm_speedup(pattern, options.head_dim, options.tile, options.element_bits),
        theory::count_nm_traffic(shape, pattern, options.element_bits).total());
  }
  for (const double density : options.density) {
    const auto kept = std::max<std::int64_t>(1, std::llround(density * static_cast<double>(options.keys)));
    add("top-k", density, theory::topk_traffic(shape, density),
        theory::topk_speedup_bound(options.head_dim, options.tile, density),
        theory::count_topk_traffic(shape, kept).total());
    for (const auto reads : {theory::FixedReads::all_values, theory::FixedReads::kept_values}) {
      add(reads == theory::FixedReads::all_values ? "fixed" : "fixed, V skipped", density,
          theory::fixed_traffic(shape, density, reads),
          theory::fixed_speedup(options.head_dim, options.tile, density, reads),
          theory::count_fixed_traffic(shape, kept, reads).total());
    }
  }
  const std::int64_t m = features_of(options);
  const double counted = theory::count_performer_traffic(shape, m).total();
  for (const auto count : {theory::FeatureMapCount::as_printed, theory::FeatureMapCount::complete}) {
    const theory::Traffic traffic = theory::performer_traffic(shape, m, count);
    const bool printed = count == theory::FeatureMapCount::as_printed;
    rows.push_back({{"rule", printed ? "Performer, as printed" : "Performer"},
                    {"density", nullptr},
                    {"scores", traffic.scores},
                    {"softmax", traffic.softmax},
                    {"values", traffic.values},
                    {"other", traffic.other},
                    {"speedup", full / traffic.total()},
                    {"speedup_long", nullptr},
                    {"speedup_counted", printed ? ordered_json(nullptr) : ordered_json(full_counted / counted)}});
  }
  return rows;
}

Rows performer_rows(const TheoryOptions& options) {
  const std::int64_t m = features_of(options);
  const auto d = static_cast<double>(options.head_dim);
  Rows rows;
  // |q|^2 = |k|^2 = d, what N(0, I) entries give; the errors are relative to SM^2.
  for (const double score : {-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0}) {
    const theory::KernelPoint point{score * std::sqrt(d), d, d, options.head_dim};
    if (std::abs(point.dot) > d) continue;
    const double square = theory::softmax_kernel(point) * theory::softmax_kernel(point);
    rows.push_back({{"score", score},
                    {"SM", theory::softmax_kernel(point)},
                    {"mse_1:2", theory::nm_kernel_mse({1, 2}, point) / square},
                    {"mse_2:4", theory::nm_kernel_mse({2, 4}, point) / square},
                    {"performer_independent", theory::performer_mse_independent(point, m) / square},
                    {"performer_orthogonal", theory::performer_mse_orthogonal(point, m) / square},
                    {"performer_bound", theory::performer_mse_orthogonal_bound(point, m) / square},
                    {"performer_bound_as_printed", theory::performer_mse_bound_as_printed(point, m) / square}});
  }
  ordered_json mean{{"score", "mean"},
                    {"SM", nullptr},
                    {"mse_1:2", theory::nm_relative_mse({1, 2}, 1.0)},
                    {"mse_2:4", theory::nm_relative_mse({2, 4}, 1.0)}};
  if (options.head_dim > 36) mean["performer_independent"] = theory::performer_relative_mse(options.head_dim, m);
  rows.push_back(std::move(mean));
  return rows;
}

Rows combined_rows(const TheoryOptions& options) {
  Rows rows;
  std::vector<Pattern> patterns = {Pattern::dense()};
  for (const Pattern pattern : patterns_of(options)) patterns.push_back(pattern);
  const theory::Shape shape{.keys = options.keys, .head_dim = options.head_dim, .tile = options.tile};
  const theory::NystromShape nystrom{
      .keys = options.keys, .head_dim = options.head_dim, .tile = options.tile, .landmarks = options.landmarks};
  const theory::LinformerShape linformer{
      .keys = options.keys, .head_dim = options.head_dim, .tile = options.tile, .projected = options.projected};
  const int bits = options.element_bits;
  const double nystrom_dense = theory::nystrom_traffic(nystrom, Pattern::dense(), bits).total();
  const double linformer_dense = theory::linformer_traffic(linformer, Pattern::dense(), bits).total();
  const double block_dense = theory::block_sparse_traffic(shape, options.block_density, Pattern::dense(), bits).total();
  for (const Pattern pattern : patterns) {
    const double nystrom_here = theory::nystrom_traffic(nystrom, pattern, bits).total();
    const double linformer_here = theory::linformer_traffic(linformer, pattern, bits).total();
    const double block_here = theory::block_sparse_traffic(shape, options.block_density, pattern, bits).total();
    rows.push_back({{"pattern", to_string(pattern)},
                    {"nystrom_products", theory::nystrom_products(nystrom, pattern)},
                    {"nystrom_memory", theory::nystrom_memory(nystrom, pattern)},
                    {"nystrom_traffic", nystrom_here},
                    {"nystrom_gain", nystrom_dense / nystrom_here},
                    {"linformer_traffic", linformer_here},
                    {"linformer_gain", linformer_dense / linformer_here},
                    {"block_sparse_traffic", block_here},
                    {"block_sparse_gain", block_dense / block_here}});
  }
  return rows;
}

Rows predicted_rows(const ordered_json& maps, const TheoryOptions& options) {
  if (!maps.is_object() || !maps.contains("rows") || !maps["rows"].is_array()) {
    throw Error("predict: expected a JSON object with an array \"rows\"");
  }
  Rows rows;
  std::size_t index = 0;
  for (const ordered_json& head : maps["rows"]) {
    const std::string where = "predict: rows[" + std::to_string(index++) + "]: ";
    for (const char* key : {"sigma", "sink", "rho"}) {
      if (!head.contains(key)) throw Error(where + "expected an entry \"" + key + "\", found none");
    }
    const auto number_of = [&](const std::string& name, const ordered_json& given, const char* expected,
                               bool (*fits)(double)) {
      if (given.is_number() && fits(given.get<double>())) return given.get<double>();
      throw Error(where + name + ": expected " + expected + ", got " + given.dump());
    };
    std::vector<double> correlation(kInterleaveBlock, 0.0);
    correlation[0] = 1.0;
    if (!head["rho"].is_object()) throw Error(where + "rho: expected an object of lags, got " + head["rho"].dump());
    for (const auto& [lag, value] : head["rho"].items()) {
      std::size_t distance = 0;
      const auto [end, error] = std::from_chars(lag.data(), lag.data() + lag.size(), distance);
      if (error != std::errc{} || end != lag.data() + lag.size()) {
        throw Error(where + "rho: expected lags that are integers, got \"" + lag + "\"");
      }
      const double rho =
          number_of("rho[" + lag + "]", value, "a number in [-1, 1]", [](double x) { return std::abs(x) <= 1; });
      if (distance >= 1 && distance < kInterleaveBlock) correlation[distance] = rho;
    }
    const double sigma =
        number_of("sigma", head["sigma"], "a finite number > 0", [](double x) { return std::isfinite(x) && x > 0; });
    const double sink =
        number_of("sink", head["sink"], "a number in [0, 1]", [](double x) { return x >= 0 && x <= 1; });
    ordered_json row;
    for (const char* name : {"model", "layer", "head"}) row[name] = head.value(name, ordered_json());
    for (const Pattern pattern : patterns_of(options)) {
      // The first key stays in its group; the rest of the row follows the model. Q^1, the kept weight.
      row["independent"][to_string(pattern)] = sink + (1.0 - sink) * theory::nm_quality(pattern, 1.0, sigma);
      for (const Grouping grouping : {Grouping::consecutive, Grouping::interleaved}) {
        const double rest = theory::nm_quality_grouped(pattern, grouping, 1.0, sigma, correlation);
        row["predicted"][to_string(pattern) + " " + to_string(grouping)] = sink + (1.0 - sink) * rest;
      }
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

const std::vector<Section>& theory_sections() {
  static const std::vector<Section> sections = {
      {"paper", "The paper's numbers", paper_rows},
      {"quality", "Quality Q^p of independent scores", quality_rows},
      {"grouping", "Quality of correlated scores, by grouping", grouping_rows},
      {"speed", "Memory traffic and speedup over full attention", speed_rows},
      {"performer", "Error of one kernel value relative to SM^2, at |q|^2 = |k|^2 = d", performer_rows},
      {"combined", "N:M inside other mechanisms", combined_rows},
  };
  return sections;
}

}  // namespace dspattn::apps
