#include "apps/problem_options.h"

#include <algorithm>
#include <charconv>

namespace dspattn::apps {

DType parse_dtype(const std::string& text) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (text == name(dtype)) return dtype;
  }
  throw Error("dtype: expected fp32, fp16 or bf16, got \"" + text + "\"");
}

Rest parse_rest(const std::string& text) {
  if (text == "drop") return Rest::drop;
  if (text == "mean") return Rest::mean;
  throw Error("rest: expected drop or mean, got \"" + text + "\"");
}

Choice parse_selection(const std::string& text) {
  if (text == "own") return Choice::each_head;
  if (text == "shared") return Choice::shared;
  throw Error("selection: expected own or shared, got \"" + text + "\"");
}

Device parse_device(const std::string& text) {
  if (text == "cpu") return {};
  Device device{DeviceType::cuda, 0};
  const std::string prefix = "cuda:";
  if (text == "cuda") return device;
  if (text.starts_with(prefix)) {
    const char* end = text.data() + text.size();
    const auto [stop, code] = std::from_chars(text.data() + prefix.size(), end, device.index);
    if (code == std::errc{} && stop == end && device.index >= 0) return device;
  }
  throw Error("device: expected cpu, cuda or cuda:<index>, got \"" + text + "\"");
}

std::string to_string(Device device) {
  return device.type == DeviceType::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

void RuleOptions::add_to(Command& command) {
  command.add_option("--pattern", pattern, "keep N of every M scores, as N:M (1 <= N <= M <= 32), or dense")
      .type_name("N:M")
      .capture_default_str();
  command
      .add_option("--grouping", grouping,
                  "which M keys compete: interleaved (a stride apart within 128 keys) or consecutive (neighbours)")
      .type_name("NAME")
      .capture_default_str();
  command
      .add_option(
          "--rest", rest,
          "what becomes of the weight of pruned keys: drop (left out of the softmax) or mean (brings the mean of "
          "the values)")
      .type_name("NAME")
      .capture_default_str();
  command
      .add_option(
          "--selection", selection,
          "whose scores choose the keys: own (each query head's) or shared (by the heads of a key head together)")
      .type_name("NAME")
      .capture_default_str();
  command.add_flag("--causal", causal, "a query sees only keys up to its own position");
  command.add_flag("--top-left", top_left,
                   "with n_q != n_k, put the diagonal of --causal and windows at the first key instead of the last");
  command.add_option("--offset", offset, "move that diagonal: with --top-left, the key position of query 0")
      .type_name("KEYS");
  command.add_option("--window-left", window_left, "a query sees at most this many keys before its position")
      .type_name("KEYS");
  command.add_option("--window-right", window_right, "a query sees at most this many keys after its position")
      .type_name("KEYS");
  command.add_option("--scale", scale, "factor of q.k before softmax (default 1/sqrt(d))").type_name("FACTOR");
}

void RuleOptions::apply(Problem& problem) const {
  problem.pattern = parse_pattern(pattern);
  problem.grouping = parse_grouping(grouping);
  problem.rest = parse_rest(rest);
  problem.choice = parse_selection(selection);
  problem.scale = scale;
  problem.mask.causal = causal;
  problem.mask.alignment = top_left ? Alignment::top_left : Alignment::bottom_right;
  problem.mask.offset = offset;
  problem.mask.window_left = window_left;
  problem.mask.window_right = window_right;
}

std::vector<Option> ShapeOptions::add_to(Command& command) {
  std::vector<Option> options;
  options.push_back(command.add_option("--batch", batch, "sequences").capture_default_str());
  options.push_back(command.add_option("--heads", heads, "query heads").capture_default_str());
  options.push_back(command.add_option("--kv-heads", kv_heads, "key and value heads; divides heads (default: heads)"));
  options.push_back(command.add_option("--n", n, "queries and keys per sequence (default: 1024)"));
  options.push_back(command.add_option("--n-q", n_q, "queries per sequence, where different from --n"));
  options.push_back(command.add_option("--n-k", n_k, "keys per sequence, where different from --n"));
  options.push_back(command.add_option("--d", d, "head dimension, up to 512").capture_default_str());
  options.push_back(command.add_option("--d-v", d_v, "head dimension of the values (default: d)"));
  for (Option& option : options) option.type_name("COUNT");
  return options;
}

Error too_large(const Sizes& sizes, const std::string& expected) {
  const auto largest =
      std::max_element(sizes.begin(), sizes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::string given;
  for (const auto& [option, value] : sizes) {
    given += (given.empty() ? "" : ", ") + std::string(option) + " " + std::to_string(value);
  }
  return Error(std::string(largest->first) + ": expected " + expected + ", got " + given);
}

}  // namespace dspattn::apps
