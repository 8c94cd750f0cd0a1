// The options that say which attention problem is meant; shared by the subcommands that take one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apps/parser.h"
#include "dspattn/attention.h"

namespace dspattn::apps {

// "fp32", "fp16", "bf16". Throws Error for anything else.
DType parse_dtype(const std::string& text);
// "drop", "mean". Throws Error for anything else.
Rest parse_rest(const std::string& text);
// "own", "shared". Throws Error for anything else.
Choice parse_selection(const std::string& text);
// "cpu", "cuda", "cuda:1". Throws Error for anything else.
Device parse_device(const std::string& text);
std::string to_string(Device device);

// What the score matrix goes through: pattern, grouping, rest, selection, diagonal masks, scale.
struct RuleOptions {
  std::string pattern = "2:4";
  std::string grouping = "interleaved";
  std::string rest = "drop";
  std::string selection = "own";
  bool causal = false;
  bool top_left = false;
  std::int64_t offset = 0;
  std::optional<std::int64_t> window_left;
  std::optional<std::int64_t> window_right;
  std::optional<double> scale;

  void add_to(Command& command);
  // Sets pattern, grouping, rest, choice, scale and the diagonal part of the mask. Throws Error.
  void apply(Problem& problem) const;
};

// The sizes of a problem.
struct ShapeOptions {
  std::int64_t batch = 1;
  std::int64_t heads = 8;
  std::optional<std::int64_t> kv_heads;
  std::optional<std::int64_t> n;
  std::optional<std::int64_t> n_q;
  std::optional<std::int64_t> n_k;
  std::int64_t d = 64;
  std::optional<std::int64_t> d_v;

  // The options added, so that a caller can see whether any was given.
  std::vector<Option> add_to(Command& command);
  std::int64_t queries() const { return n_q.value_or(n.value_or(1024)); }
  std::int64_t keys() const { return n_k.value_or(n.value_or(1024)); }
  std::int64_t key_heads() const { return kv_heads.value_or(heads); }
  std::int64_t value_dim() const { return d_v.value_or(d); }
};

// Sizes by the options that gave them.
using Sizes = std::vector<std::pair<const char*, std::int64_t>>;

// An error of sizes that are too large together: it names the largest, and has all of them.
Error too_large(const Sizes& sizes, const std::string& expected);

}  // namespace dspattn::apps
