// dspattn theory: what a pattern keeps and saves, by the paper's formulas, as tables or JSON.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/commands.h"
#include "apps/output_file.h"
#include "apps/parser.h"
#include "apps/theory_tables.h"
#include "dspattn/error.h"

namespace dspattn::apps {
namespace {

using nlohmann::ordered_json;

struct Options {
  TheoryOptions theory;
  std::vector<std::string> sections;
  std::string json;
  std::string predict;
  std::vector<std::pair<std::string, Option>> of_simulations;  // that mean nothing without --monte-carlo
};

std::string cell(const ordered_json& value) {
  if (value.is_null()) return "-";
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_number()) return value.dump();
  const double number = value.get<double>();
  char text[32];
  // Values next to 1 need their digits; everything else reads best with six.
  const bool near_one = number != 1.0 && std::abs(number - 1.0) < 1e-4;
  std::snprintf(text, sizeof text, near_one ? "%.10g" : "%.6g", number);
  return text;
}

void print_table(const Rows& rows) {
  if (rows.empty()) return;
  std::vector<std::string> names;
  for (const auto& [name, value] : rows.front().items()) names.push_back(name);
  std::vector<std::size_t> widths;
  for (const std::string& name : names) {
    std::size_t width = name.size();
    for (const ordered_json& row : rows) width = std::max(width, row.contains(name) ? cell(row[name]).size() : 1);
    widths.push_back(width);
  }
  const auto print_row = [&](const auto& text_of) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::string text = text_of(names[i]);
      std::cout << (i == 0 ? "  " : "   ") << text;
      if (i + 1 < names.size()) std::cout << std::string(widths[i] - text.size(), ' ');
    }
    std::cout << "\n";
  };
  print_row([](const std::string& name) { return name; });
  for (const ordered_json& row : rows) {
    print_row([&](const std::string& name) { return row.contains(name) ? cell(row[name]) : std::string("-"); });
  }
}

ordered_json parameters(const TheoryOptions& o) {
  return {{"p", o.p},
          {"sigma", o.sigma},
          {"density", o.density},
          {"patterns", o.patterns},
          {"keys", o.keys},
          {"head_dim", o.head_dim},
          {"tile", o.tile},
          {"features", o.features},
          {"landmarks", o.landmarks},
          {"projected", o.projected},
          {"block_density", o.block_density},
          {"element_bits", o.element_bits},
          {"correlation", o.correlation},
          {"monte_carlo", o.monte_carlo},
          {"rows", o.rows},
          {"seed", o.seed}};
}

ordered_json read_json(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error("predict: expected a readable file, got \"" + path + "\"");
  try {
    return ordered_json::parse(file);
  } catch (const ordered_json::exception& error) {
    throw Error("predict: expected JSON in \"" + path + "\", got " + error.what());
  }
}

std::vector<Section> chosen_sections(const std::vector<std::string>& names) {
  std::vector<Section> chosen;
  std::string known;
  for (const Section& section : theory_sections()) {
    known += (known.empty() ? "" : ", ") + section.name;
    if (names.empty()) chosen.push_back(section);
  }
  for (const std::string& name : names) {
    bool found = false;
    for (const Section& section : theory_sections()) {
      if (section.name == name) {
        chosen.push_back(section);
        found = true;
      }
    }
    if (!found) throw Error("section: expected one of " + known + ", got \"" + name + "\"");
  }
  return chosen;
}

void write_json(OutputFile& file, const ordered_json& content) {
  file.write([&](std::ostream& stream) { stream << content.dump(1) << "\n"; });
  file.take_place();
}

// Formulas add up as many terms, and a simulation draws rows * keys scores: with more, a run would not end.
void require_sizes(const TheoryOptions& o) {
  std::vector<std::string> reasons;
  const auto check = [&](const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (value >= least && value <= most) return;
    reasons.push_back(std::string(name) + ": expected " + std::to_string(least) + " to " + std::to_string(most) +
                      ", got " + std::to_string(value));
  };
  check("keys", o.keys, 1, 1 << 20);
  check("head_dim", o.head_dim, 2, 1 << 20);
  check("features", o.features, 0, 1 << 27);
  check("rows", o.rows, 2, (std::int64_t{1} << 37) / std::clamp<std::int64_t>(o.keys, 1, 1 << 20));
  if (!reasons.empty()) throw Error(std::move(reasons));
}

void run(const Options& options) {
  require_sizes(options.theory);
  for (const auto& [name, option] : options.of_simulations) {
    if (option.given() && !options.theory.monte_carlo)
      throw Error(name + ": expected none without --monte-carlo, got one");
  }
  ordered_json content{{"program", "dspattn theory"}, {"parameters", parameters(options.theory)}};
  content["rows"] = ordered_json::array();
  std::optional<OutputFile> json;
  if (!options.json.empty()) json.emplace("--json", options.json);
  if (!options.predict.empty()) {
    if (!options.sections.empty()) throw Error("section: expected without --predict, which has rows of its own");
    if (!json) json.emplace("--json", "-");
    for (ordered_json& row : predicted_rows(read_json(options.predict), options.theory)) {
      content["rows"].push_back(std::move(row));
    }
    write_json(*json, content);
    return;
  }
  std::vector<std::pair<Section, Rows>> tables;  // all before the first is printed: one of them may be refused
  for (const Section& section : chosen_sections(options.sections)) {
    tables.emplace_back(section, section.rows(options.theory));
  }
  for (const auto& [section, rows] : tables) {
    if (!json || !json->is_standard_output()) {
      std::cout << section.title << "\n";
      print_table(rows);
      std::cout << "\n";
    }
    for (const ordered_json& row : rows) {
      ordered_json named{{"section", section.name}};
      named.update(row);
      content["rows"].push_back(std::move(named));
    }
  }
  if (json) write_json(*json, content);
}

}  // namespace

void register_theory(Parser& parser, Outcome&) {
  Command command =
      parser.add_subcommand("theory", "What a pattern keeps of attention and what it saves, by the paper's formulas");
  auto options = std::make_shared<Options>();
  TheoryOptions& o = options->theory;
  command
      .add_option("--section", options->sections,
                  "paper, quality, grouping, speed, performer, combined; all by default")
      .delimiter(',');
  command.add_option("--p", o.p, "powers p of Q^p, > 0").delimiter(',').capture_default_str();
  command.add_option("--sigma", o.sigma, "deviations of the scores, > 0").delimiter(',').capture_default_str();
  command.add_option("--density", o.density, "densities of top-k and fixed, in (0, 1]")
      .delimiter(',')
      .capture_default_str();
  command.add_option("--pattern", o.patterns, "N:M patterns").delimiter(',').capture_default_str();
  command.add_option("--keys", o.keys, "sequence length n").capture_default_str();
  command.add_option("--head-dim", o.head_dim, "d").capture_default_str();
  command.add_option("--tile", o.tile, "tile size T").capture_default_str();
  command.add_option("--features", o.features, "Performer's features m; 0: d ln d").capture_default_str();
  command.add_option("--landmarks", o.landmarks, "Nystromformer's landmarks m").capture_default_str();
  command.add_option("--projected", o.projected, "Linformer's projected length k").capture_default_str();
  command.add_option("--block-density", o.block_density, "share of blocks that block sparsity keeps")
      .capture_default_str();
  command.add_option("--element-bits", o.element_bits, "bits of a stored weight").capture_default_str();
  command.add_option("--correlation", o.correlation, "weight:decay,... so that rho(lag) = sum of weight decay^lag")
      .capture_default_str();
  command.add_flag("--monte-carlo", o.monte_carlo, "simulate the qualities too, with standard errors");
  options->of_simulations = {
      {"rows", command.add_option("--rows", o.rows, "rows per simulation").capture_default_str()},
      {"seed", command.add_option("--seed", o.seed, "seed of the simulations").capture_default_str()}};
  command.add_option("--json", options->json,
                     "also write JSON to this file; - for standard output, without the tables");
  command.add_option("--predict", options->predict,
                     "predict the kept weight of measured heads (a file of maps), as JSON");
  command.footer(R"(
Examples:
  dspattn theory                                     every table at the paper's settings
  dspattn theory --section quality --p 1 --sigma 1.5,2 --pattern 2:4,4:8
  dspattn theory --section speed --head-dim 128 --density 0.01,0.05
  dspattn theory --section quality --monte-carlo     formulas beside simulations)");
  command.callback([options] { run(*options); });
}

}  // namespace dspattn::apps
