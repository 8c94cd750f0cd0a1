// The tables of `dspattn theory`: flat rows, printed as text or written as JSON alike.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dspattn/pattern.h"

namespace dspattn::apps {

// Everything the formulas take; the defaults are the paper's, or typical where the paper names none.
struct TheoryOptions {
  std::vector<double> p = {1.0, 2.0, 4.0, 7.0};
  std::vector<double> sigma = {1.0};
  std::vector<double> density = {0.02, 0.045, 0.1, 0.25, 0.5, 0.63};
  std::vector<std::string> patterns = {"1:2", "2:4", "1:4", "4:8"};
  std::int64_t keys = 1024;
  std::int64_t head_dim = 64;
  std::int64_t tile = 128;
  std::int64_t features = 0;  // 0: d ln d
  std::int64_t landmarks = 256;
  std::int64_t projected = 256;
  double block_density = 0.25;
  int element_bits = 16;
  std::string correlation = "0.5:0.7";  // weight:decay,... : rho(lag) = sum of weight * decay^lag
  bool monte_carlo = false;
  std::int64_t rows = 1000;
  std::uint64_t seed = 1;
};

using Rows = std::vector<nlohmann::ordered_json>;

struct Section {
  std::string name;
  std::string title;
  Rows (*rows)(const TheoryOptions&);
};

// All sections, in the order they are printed.
const std::vector<Section>& theory_sections();

Rows paper_rows(const TheoryOptions& options);
Rows quality_rows(const TheoryOptions& options);
Rows grouping_rows(const TheoryOptions& options);
Rows speed_rows(const TheoryOptions& options);
Rows performer_rows(const TheoryOptions& options);
Rows combined_rows(const TheoryOptions& options);

// What the model predicts for measured heads: `maps` is a file of `python -m experiments.theory maps`.
Rows predicted_rows(const nlohmann::ordered_json& maps, const TheoryOptions& options);

// rho(lag) for lag 0 ... count-1 of a --correlation text. Throws dspattn::Error for anything that is no such text.
std::vector<double> parse_correlation(const std::string& text, std::size_t count);

}  // namespace dspattn::apps
