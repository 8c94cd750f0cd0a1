#include "core/value_sums_check.h"

#include <string>

#include "core/geometry.h"
#include "core/half.h"
#include "core/problem_checks.h"
#include "core/tensor_checks.h"

namespace dspattn::core {
namespace {

bool check_numbers(Report& report, std::string_view argument, const ConstTensorView& view, const char* layout,
                   int rank) {
  if (view.dtype != DType::i32) report.add(std::string(argument) + ".dtype", "int32", std::string(name(view.dtype)));
  return check_input(report, argument, view, layout, rank, Inner::any) && view.dtype == DType::i32;
}

void check_lengths(Report& report, const ValueSumsArgs& args, const SumsExtents& extents) {
  const ConstTensorView& lengths = args.key_lengths;
  if (!given(lengths) || !check_numbers(report, "key_lengths", lengths, "[batch]", 1)) return;
  if (lengths.extent(0) != extents.batch) {
    report.add("key_lengths.shape[0]", "batch = " + std::to_string(extents.batch), std::to_string(lengths.extent(0)));
    return;
  }
  if (args.device.type != DeviceType::cpu || lengths.data == nullptr) return;
  for (std::int64_t i = 0; i < extents.batch; ++i) {
    const auto length = static_cast<std::int64_t>(load_element(lengths.data, DType::i32, i * lengths.step(0)));
    if (length < 0 || length > extents.n_k) {
      report.add("key_lengths[" + std::to_string(i) + "]",
                 "a length from 0 to the sequence's keys, " + std::to_string(extents.n_k), std::to_string(length));
      return;
    }
  }
}

}  // namespace

SumsExtents extents_of(const ValueSumsArgs& args) {
  if (!args.block_table.present()) return {args.v.extent(0), args.v.extent(2)};
  return {args.block_table.extent(0), args.block_table.extent(1) * args.v.extent(2)};
}

std::vector<std::string> value_sums_reasons(const ValueSumsArgs& args) {
  Report report;
  if (args.device.index < 0 || (args.device.type == DeviceType::cpu && args.device.index != 0)) {
    report.add("device.index", args.device.type == DeviceType::cpu ? "0 for the CPU" : ">= 0",
               std::to_string(args.device.index));
  }
  if (args.device.type == DeviceType::cpu && args.stream != nullptr) {
    report.add("stream", "null for CPU tensors", hex(args.stream));
  }
  if (args.new_keys < 0) report.add("new_keys", ">= 0", std::to_string(args.new_keys));
  const bool v_ok = check_input(report, "v", args.v, "[batch, kv_heads, n_k, d_v]", 4, Inner::contiguous);
  if (!is_floating(args.v.dtype)) report.add("v.dtype", "fp32, fp16 or bf16", std::string(name(args.v.dtype)));
  if (v_ok && args.v.extent(3) > kMaxHeadDim) {
    report.add("v.shape[3]", "a head dimension up to " + std::to_string(kMaxHeadDim), std::to_string(args.v.extent(3)));
  }
  bool known = v_ok;
  if (given(args.block_table)) {
    known = check_numbers(report, "block_table", args.block_table, "[batch, blocks]", 2) && known;
    constexpr std::int64_t kPageUnit = 16;
    if (v_ok && (args.v.extent(2) < kPageUnit || args.v.extent(2) % kPageUnit != 0)) {
      report.add("v.shape[2]", "a page size that is a multiple of 16", std::to_string(args.v.extent(2)));
    }
  }
  const bool sums_ok =
      check_output(report, "sums", args.sums, "[batch, kv_heads, 2 * blocks, d_v + 1]", 4, Inner::contiguous);
  if (!known) return report.reasons;
  const SumsExtents extents = extents_of(args);
  if (extents.n_k > kMostSummedKeys) {
    report.add("v.shape[2]", "at most 2^29 keys a sequence", std::to_string(extents.n_k));
  }
  check_lengths(report, args, extents);
  if (sums_ok) {
    check_sums_shape(report, "sums", args.sums, extents.batch, args.v.extent(1), extents.n_k, args.v.extent(3));
  }
  if (report.reasons.empty()) {
    check_apart(report, "sums", args.sums, "v", args.v);
    if (given(args.block_table)) check_apart(report, "sums", args.sums, "block_table", args.block_table);
    if (given(args.key_lengths)) check_apart(report, "sums", args.sums, "key_lengths", args.key_lengths);
  }
  return report.reasons;
}

}  // namespace dspattn::core
