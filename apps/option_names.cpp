#include "apps/option_names.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <utility>

namespace dspattn::apps {
namespace {

// Arguments whose option has another name. Of several, the first that was given, or else the first there is.
constexpr std::pair<std::string_view, std::string_view> kOptions[] = {
    {"choice", "--selection"},
    {"mask.allowed", "--mask"},
    {"mask.bias", "--bias"},
    {"mask.key_lengths", "--key-lengths"},
    {"mask.offset", "--offset"},
    {"mask.window_left", "--window-left"},
    {"mask.window_right", "--window-right"},
    {"packed.cu_q", "--cu-q"},
    {"packed.cu_k", "--cu-k"},
    // Of commands that make up their tensors.
    {"q.shape[0]", "--batch"},
    {"q.shape[1]", "--heads"},
    {"q.shape[2]", "--n-q"},
    {"q.shape[2]", "--n"},
    {"q.shape[3]", "--d"},
    {"k.shape[1]", "--kv-heads"},
    {"k.shape[2]", "--n-k"},
    {"k.shape[2]", "--n"},
    {"k.shape[3]", "--d"},
    {"v.shape[3]", "--d-v"},
    {"v.shape[3]", "--d"},
    {"q.dtype", "--dtype"},
    // Of the formulas.
    {"p * sigma", "--p * --sigma"},
    {"pattern.keep", "--pattern"},
    {"pattern.group", "--pattern"},
};

// What may follow an argument in a sentence about it.
bool ends_argument(std::string_view rest) {
  return rest.starts_with(": ") || rest.starts_with(".") || rest.starts_with("[") || rest.starts_with(" must be ");
}

// "--head-dim" for the argument head_dim.
std::string option_of(std::string_view argument) {
  std::string option = "--" + std::string(argument);
  std::replace(option.begin(), option.end(), '_', '-');
  return option;
}

std::string renamed(std::string_view sentence, const LookUp& look_up) {
  for (const Known wanted : {Known::given, Known::optional}) {
    for (const auto& [argument, option] : kOptions) {
      if (!sentence.starts_with(argument) || !ends_argument(sentence.substr(argument.size()))) continue;
      if (look_up(std::string(option.substr(0, option.find(' ')))) < wanted) continue;
      std::string rest(sentence.substr(argument.size()));
      if (rest.starts_with(".")) rest[0] = ' ';  // of "mask.allowed.dtype"
      return std::string(option) + rest;
    }
  }
  // An option of the same name. What goes on with a point may be a file's name, and is left alone.
  const std::size_t end = static_cast<std::size_t>(
      std::find_if(sentence.begin(), sentence.end(),
                   [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_' && c != '-'; }) -
      sentence.begin());
  const std::string_view rest = sentence.substr(end);
  if (end > 0 && (rest.starts_with(": ") || rest.starts_with(" must be ")) &&
      look_up(option_of(sentence.substr(0, end))) != Known::no) {
    return option_of(sentence.substr(0, end)) + std::string(rest);
  }
  return std::string(sentence);
}

std::string renamed_reason(const std::string& reason, const LookUp& look_up) {
  constexpr std::string_view kRefusal = " cannot serve: ";
  constexpr std::string_view kBetween = "; ";
  if (const std::size_t refusal = reason.find(kRefusal);
      reason.starts_with("kernel ") && refusal != std::string::npos) {
    std::string result = reason.substr(0, refusal + kRefusal.size());
    for (std::size_t begin = result.size(); begin <= reason.size();) {
      const std::size_t end = std::min(reason.find(kBetween, begin), reason.size());
      if (begin > refusal + kRefusal.size()) result += kBetween;
      result += renamed(std::string_view(reason).substr(begin, end - begin), look_up);
      begin = end + kBetween.size();
    }
    return result;
  }
  // "nm_quality: p must be ...": of the formulas, the function comes first.
  if (const std::size_t colon = reason.find(": ");
      colon != std::string::npos && reason.find(" must be ") != std::string::npos) {
    return renamed(std::string_view(reason).substr(colon + 2), look_up);
  }
  return renamed(reason, look_up);
}

}  // namespace

std::vector<std::string> with_option_names(const std::vector<std::string>& reasons, const LookUp& look_up) {
  std::vector<std::string> result;
  for (const std::string& reason : reasons) {
    std::string named = renamed_reason(reason, look_up);
    // Two arguments may have come from one option, and be wrong alike.
    if (std::find(result.begin(), result.end(), named) == result.end()) result.push_back(std::move(named));
  }
  return result;
}

}  // namespace dspattn::apps
