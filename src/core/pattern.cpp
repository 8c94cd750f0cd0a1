#include "dspattn/pattern.h"

#include <charconv>

#include "dspattn/error.h"

namespace dspattn {
namespace {

// Plain decimal: no sign, no leading zero.
bool parse_positive(std::string_view text, int& value) {
  if (text.empty() || text.front() < '1' || text.front() > '9') return false;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  return code == std::errc{} && end == text.data() + text.size();
}

}  // namespace

Pattern parse_pattern(std::string_view text) {
  if (text == "dense") return Pattern::dense();
  const std::size_t colon = text.find(':');
  Pattern pattern;
  if (colon == std::string_view::npos || !parse_positive(text.substr(0, colon), pattern.keep) ||
      !parse_positive(text.substr(colon + 1), pattern.group) || pattern.keep > pattern.group ||
      pattern.group > kMaxGroup) {
    throw Error("pattern: expected \"dense\" or \"N:M\" with 1 <= N <= M <= " + std::to_string(kMaxGroup) + ", got \"" +
                std::string(text) + "\"");
  }
  return pattern;
}

Grouping parse_grouping(std::string_view text) {
  if (text == "consecutive") return Grouping::consecutive;
  if (text == "interleaved") return Grouping::interleaved;
  throw Error("grouping: expected \"consecutive\" or \"interleaved\", got \"" + std::string(text) + "\"");
}

std::string to_string(Pattern pattern) {
  if (pattern == Pattern::dense()) return "dense";
  return std::to_string(pattern.keep) + ":" + std::to_string(pattern.group);
}

std::string to_string(Grouping grouping) { return grouping == Grouping::consecutive ? "consecutive" : "interleaved"; }

}  // namespace dspattn
