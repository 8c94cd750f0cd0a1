// One line of the kernel table. A backend publishes its rows; src/api joins them. Adding a kernel is adding a row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dspattn/kernels.h"

namespace dspattn::core {

using Reasons = std::vector<std::string>;

// What a row has against a problem: the reasons, or only whether there are any. Every call asks dozens of rows, and
// text is for those who read it.
class Refusals {
 public:
  enum class Text { wanted, not_wanted };

  explicit Refusals(Text text) : wanted_(text == Text::wanted) {}

  // `reason` makes the text.
  template <typename Reason>
  void add(Reason reason) {
    any_ = true;
    if (wanted_) reasons_.push_back(reason());
  }
  void add_all(const Reasons& reasons) {
    any_ = any_ || !reasons.empty();
    if (wanted_) reasons_.insert(reasons_.end(), reasons.begin(), reasons.end());
  }

  bool any() const { return any_; }
  const Reasons& reasons() const { return reasons_; }

 private:
  bool wanted_;
  bool any_ = false;
  Reasons reasons_;
};

// What a kernel may serve beyond the plain contract, one bit each.
enum class Feature : std::uint16_t {
  fp32_results = 1,  // reads and writes fp32 results of 16-bit inputs
  rest_mean = 2,
  shared_choice = 4,
  dropout = 8,
  soft_cap = 16,
  sinks = 32,
  paged = 64,
  d_lse = 128,
  d_bias = 256,
  d_sinks = 512,
};

inline constexpr Feature kAllFeatures[] = {
    Feature::fp32_results, Feature::rest_mean, Feature::shared_choice, Feature::dropout, Feature::soft_cap,
    Feature::sinks,        Feature::paged,     Feature::d_lse,         Feature::d_bias,  Feature::d_sinks};

class Features {
 public:
  constexpr Features() = default;
  constexpr Features(std::initializer_list<Feature> features) {
    for (const Feature feature : features) add(feature);
  }
  constexpr void add(Feature feature) { bits_ |= static_cast<unsigned>(feature); }
  constexpr bool has(Feature feature) const { return (bits_ & static_cast<unsigned>(feature)) != 0; }
  constexpr bool has_all(Features others) const { return (others.bits_ & ~bits_) == 0; }

 private:
  unsigned bits_ = 0;
};

// What a row takes, as far as three comparisons tell: the table asks only those it matches for their reasons.
struct RowKey {
  std::optional<DType> dtype;
  std::optional<Pattern> pattern;
  std::int64_t dim_above = -1;  // the larger of d and d_v is above this
  std::int64_t dim = kMaxHeadDim;

  bool matches(const Problem& problem) const {
    const std::int64_t larger = std::max(problem.q.extent(3), problem.v.extent(3));
    return (!dtype || *dtype == problem.q.dtype) && (!pattern || *pattern == problem.pattern) && larger <= dim &&
           (larger > dim_above || dim_above == 0);
  }
};

struct KernelRow {
  KernelInfo info;
  RowKey takes = {};
  // Adds every reason the kernel cannot serve a valid problem, each naming the argument, what the kernel takes and what
  // was given.
  void (*why_not)(const Problem& problem, Refusals& refusals) = nullptr;
  // Whether a kernel further down the table is faster at a problem that this one serves: then it is taken only where no
  // other serves, or by name. Null: never.
  bool (*yields)(const Problem& problem) = nullptr;
  // How the kernel would serve such a problem, in lines of text; null, or empty: there is nothing to decide.
  std::string (*plan)(const Problem& problem) = nullptr;
  // Exactly one of each pair is set, according to info.pass. Called only with validated arguments and no reasons.
  std::size_t (*forward_workspace)(const ForwardArgs& args) = nullptr;
  void (*forward)(const ForwardArgs& args) = nullptr;
  std::size_t (*backward_workspace)(const BackwardArgs& args) = nullptr;
  void (*backward)(const BackwardArgs& args) = nullptr;
  // What of it the kernel serves; api refuses problems that need more, so that the kernel never sees them.
  Features features = {};
};

}  // namespace dspattn::core
