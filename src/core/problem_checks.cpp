#include "core/problem_checks.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include "core/geometry.h"
#include "core/half.h"

namespace dspattn::core {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

// What the later checks need of q, k, v once they are known to make sense together.
struct Sizes {
  bool known = false;      // q, k and v have usable shapes
  std::int64_t batch = 0;  // sequences
  std::int64_t n_q = 0;    // rows a mask tensor spans: of a packed batch the longest sequence
  std::int64_t n_k = 0;
};

std::int64_t int_at(const ConstTensorView& view, std::int64_t index) {
  return static_cast<std::int64_t>(load_element(view.data, view.dtype, index * view.step(0)));
}

void check_equal_extent(Report& report, const char* argument, const ConstTensorView& view, int dim, const char* what,
                        std::int64_t expected) {
  if (view.extent(dim) != expected) {
    report.add(std::string(argument) + ".shape[" + std::to_string(dim) + "]",
               std::string(what) + " = " + std::to_string(expected), std::to_string(view.extent(dim)));
  }
}

void check_head_dim(Report& report, const char* argument, const ConstTensorView& view) {
  const std::int64_t extent = view.extent(3);
  const bool other_extents_positive = view.extent(0) > 0 && view.extent(1) > 0 && view.extent(2) > 0;
  if (extent > kMaxHeadDim || (extent < 1 && other_extents_positive)) {
    report.add(std::string(argument) + ".shape[3]", "a head dimension from 1 to " + std::to_string(kMaxHeadDim),
               std::to_string(extent));
  }
}

// Returns whether q, k, v agree well enough for the sizes to mean something.
bool check_qkv(Report& report, const Problem& problem) {
  const ConstTensorView& q = problem.q;
  const ConstTensorView& k = problem.k;
  const ConstTensorView& v = problem.v;
  const bool q_ok = check_input(report, "q", q, "[batch, heads, n_q, d]", 4, Inner::contiguous);
  const bool k_ok = check_input(report, "k", k, "[batch, kv_heads, n_k, d]", 4, Inner::contiguous);
  const bool v_ok = check_input(report, "v", v, "[batch, kv_heads, n_k, d_v]", 4, Inner::contiguous);
  if (!is_floating(q.dtype)) report.add("q.dtype", "fp32, fp16 or bf16", std::string(name(q.dtype)));
  for (const auto& [argument, view] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
    if (view->dtype != q.dtype) {
      report.add(std::string(argument) + ".dtype", "q's type " + std::string(name(q.dtype)),
                 std::string(name(view->dtype)));
    }
  }
  if (!q_ok || !k_ok || !v_ok) return false;

  if (given(problem.block_table)) {
    check_equal_extent(report, "v", v, 0, "k's pages", k.extent(0));
  } else {
    check_equal_extent(report, "k", k, 0, "q's batch", q.extent(0));
    check_equal_extent(report, "v", v, 0, "q's batch", q.extent(0));
  }
  check_equal_extent(report, "v", v, 1, "k's kv_heads", k.extent(1));
  check_equal_extent(report, "v", v, 2, "k's n_k", k.extent(2));
  check_equal_extent(report, "k", k, 3, "q's d", q.extent(3));
  check_head_dim(report, "q", q);
  check_head_dim(report, "v", v);
  const std::int64_t heads = q.extent(1);
  const std::int64_t kv_heads = k.extent(1);
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
    report.add("q.shape[1]", "heads a multiple of k's kv_heads = " + std::to_string(kv_heads), std::to_string(heads));
  }
  return true;
}

void check_pattern(Report& report, const Problem& problem) {
  const Pattern pattern = problem.pattern;
  if (pattern.keep < 1 || pattern.keep > pattern.group || pattern.group > kMaxGroup) {
    report.add("pattern", "N:M with 1 <= N <= M <= " + std::to_string(kMaxGroup),
               std::to_string(pattern.keep) + ":" + std::to_string(pattern.group));
    return;
  }
  if (problem.grouping == Grouping::interleaved && !pattern.is_dense() && kInterleaveBlock % pattern.group != 0) {
    report.add("pattern", "a group size that divides " + std::to_string(kInterleaveBlock) + " for interleaved grouping",
               to_string(pattern));
  }
}

void check_scale(Report& report, const Problem& problem) {
  if (!problem.scale) return;
  const double scale = *problem.scale;
  // Every backend scales in fp32, and divides biases by the scale: where fp32 cannot hold both the scale and its
  // inverse as normal numbers, one of them would act as 0 or infinity.
  if (!(scale >= kLeastScale && scale <= kLargestScale)) {
    report.add("scale", "a finite, positive number from 2^-126 to 2^126 (1.18e-38 to 8.51e37)", number(scale));
  }
}

// One of cu_q and cu_k. Its values are readable only on the CPU.
void check_cumulative(Report& report, std::string_view argument, const ConstTensorView& cu,
                      std::string_view max_argument, std::int64_t longest_given, std::int64_t total, bool readable) {
  if (longest_given < 0) report.add(max_argument, "a length >= 0", std::to_string(longest_given));
  const bool shape_ok = check_input(report, argument, cu, "[batch + 1]", 1, Inner::any);
  if (cu.dtype != DType::i32) report.add(std::string(argument) + ".dtype", "int32", std::string(name(cu.dtype)));
  if (!shape_ok || cu.dtype != DType::i32) return;
  if (cu.extent(0) < 1) {
    report.add(std::string(argument) + ".shape[0]", "batch + 1, at least 1", std::to_string(cu.extent(0)));
    return;
  }
  if (!readable || cu.data == nullptr) return;

  if (int_at(cu, 0) != 0) report.add(std::string(argument) + "[0]", "0", std::to_string(int_at(cu, 0)));
  std::int64_t longest = 0;
  for (std::int64_t i = 1; i < cu.extent(0); ++i) {
    const std::int64_t length = int_at(cu, i) - int_at(cu, i - 1);
    if (length < 0) {
      report.add(std::string(argument) + "[" + std::to_string(i) + "]",
                 "at least the value before it, " + std::to_string(int_at(cu, i - 1)), std::to_string(int_at(cu, i)));
      return;
    }
    longest = std::max(longest, length);
  }
  const std::int64_t end = int_at(cu, cu.extent(0) - 1);
  if (end > total) {
    report.add(std::string(argument) + "[" + std::to_string(cu.extent(0) - 1) + "]",
               "at most the packed rows " + std::to_string(total), std::to_string(end));
  }
  if (longest_given < longest) {
    report.add(max_argument, "at least the longest sequence, " + std::to_string(longest),
               std::to_string(longest_given));
  }
}

void check_packed(Report& report, const Problem& problem) {
  const Packed& packed = *problem.packed;
  const bool readable = problem.device.type == DeviceType::cpu;
  for (const auto& [argument, view] : {std::pair{"q", &problem.q}, std::pair{"k", &problem.k}}) {
    if (view->extent(0) != 1) {
      report.add(std::string(argument) + ".shape[0]", "1 for a packed batch", std::to_string(view->extent(0)));
    }
  }
  check_cumulative(report, "packed.cu_q", packed.cu_q, "packed.max_q", packed.max_q, problem.q.extent(2), readable);
  check_cumulative(report, "packed.cu_k", packed.cu_k, "packed.max_k", packed.max_k, problem.k.extent(2), readable);
  if (packed.cu_q.rank == 1 && packed.cu_k.rank == 1 && packed.cu_q.extent(0) != packed.cu_k.extent(0)) {
    report.add("packed.cu_k.shape[0]", "cu_q's extent " + std::to_string(packed.cu_q.extent(0)),
               std::to_string(packed.cu_k.extent(0)));
  }
}

Sizes sizes_of(const Problem& problem) {
  if (problem.block_table.present()) {
    return {true, problem.q.extent(0), problem.q.extent(2), problem.block_table.extent(1) * problem.k.extent(2)};
  }
  if (!problem.packed) return {true, problem.q.extent(0), problem.q.extent(2), problem.k.extent(2)};
  return {true, problem.packed->cu_q.extent(0) - 1, problem.packed->max_q, problem.packed->max_k};
}

void check_mask_tensor(Report& report, std::string_view argument, const ConstTensorView& view, const Problem& problem,
                       const Sizes& sizes) {
  if (!given(view)) return;
  const std::int64_t heads = problem.q.extent(1);
  if (!check_input(report, argument, view, "[batch|1, heads|1, n_q|1, n_k|1]", 4, Inner::any) || !sizes.known) return;
  const std::array<std::int64_t, 4> full{sizes.batch, heads, sizes.n_q, sizes.n_k};
  const char* const names[4] = {"batch", "heads", "n_q", "n_k"};
  for (int dim = 0; dim < 4; ++dim) {
    const std::int64_t expected = full[static_cast<std::size_t>(dim)];
    if (view.extent(dim) != 1 && view.extent(dim) != expected) {
      report.add(std::string(argument) + ".shape[" + std::to_string(dim) + "]",
                 "1 or " + std::string(names[dim]) + " = " + std::to_string(expected),
                 std::to_string(view.extent(dim)));
    }
  }
}

void check_key_lengths(Report& report, const Problem& problem, const Sizes& sizes) {
  const ConstTensorView& lengths = problem.mask.key_lengths;
  if (!given(lengths)) return;
  const bool shape_ok = check_input(report, "mask.key_lengths", lengths, "[batch]", 1, Inner::any);
  if (lengths.dtype != DType::i32) {
    report.add("mask.key_lengths.dtype", "int32", std::string(name(lengths.dtype)));
    return;
  }
  if (!shape_ok || !sizes.known) return;
  if (lengths.extent(0) != sizes.batch) {
    report.add("mask.key_lengths.shape[0]", "batch = " + std::to_string(sizes.batch),
               std::to_string(lengths.extent(0)));
    return;
  }
  if (problem.device.type != DeviceType::cpu || lengths.data == nullptr) return;
  const bool per_sequence = problem.packed && report.reasons.empty() && problem.packed->cu_k.data != nullptr;
  for (std::int64_t i = 0; i < sizes.batch; ++i) {
    const std::int64_t keys =
        per_sequence ? int_at(problem.packed->cu_k, i + 1) - int_at(problem.packed->cu_k, i) : sizes.n_k;
    const std::int64_t length = int_at(lengths, i);
    if (length < 0 || length > keys) {
      report.add("mask.key_lengths[" + std::to_string(i) + "]",
                 "a length from 0 to the sequence's keys, " + std::to_string(keys), std::to_string(length));
      return;
    }
  }
}

void check_mask(Report& report, const Problem& problem, const Sizes& sizes) {
  const Mask& mask = problem.mask;
  if (mask.window_left && *mask.window_left < 0) {
    report.add("mask.window_left", ">= 0", std::to_string(*mask.window_left));
  }
  if (mask.window_right && *mask.window_right < 0) {
    report.add("mask.window_right", ">= 0", std::to_string(*mask.window_right));
  }
  if (mask.offset < -kMaxOffset || mask.offset > kMaxOffset) {
    report.add("mask.offset", "from -2^39 to 2^39", std::to_string(mask.offset));
  }
  check_key_lengths(report, problem, sizes);
  check_mask_tensor(report, "mask.allowed", mask.allowed, problem, sizes);
  if (given(mask.allowed) && mask.allowed.dtype != DType::b8) {
    report.add("mask.allowed.dtype", "bool", std::string(name(mask.allowed.dtype)));
  }
  check_mask_tensor(report, "mask.bias", mask.bias, problem, sizes);
  if (given(mask.bias) && mask.bias.dtype != DType::f32 && mask.bias.dtype != problem.q.dtype) {
    report.add("mask.bias.dtype", "fp32 or q's type " + std::string(name(problem.q.dtype)),
               std::string(name(mask.bias.dtype)));
  }
}

// A mask tensor that hides different keys from different queries, of which rest = mean knows nothing.
void check_one_row(Report& report, std::string_view argument, const ConstTensorView& view) {
  if (view.present() && view.rank == 4 && view.extent(2) > 1 && view.step(2) != 0) {
    report.add(std::string(argument) + ".shape[2]",
               "1 with rest = mean (a key that a mask hides from some queries would reach them through the mean)",
               std::to_string(view.extent(2)));
  }
}

void check_rest(Report& report, const Problem& problem) {
  if (problem.rest == Rest::drop) return;
  check_one_row(report, "mask.allowed", problem.mask.allowed);
  check_one_row(report, "mask.bias", problem.mask.bias);
  if (problem.dropout.probability > 0) {
    report.add("dropout.probability", "0 with rest = mean, which is for inference",
               number(problem.dropout.probability));
  }
}

void check_dropout(Report& report, const Dropout& dropout) {
  if (!(dropout.probability >= 0 && dropout.probability < 1)) {
    report.add("dropout.probability", "at least 0 and below 1", number(dropout.probability));
  }
  if (!given(dropout.state)) return;
  if (dropout.state.dtype != DType::i32) {
    report.add("dropout.state.dtype", "int32", std::string(name(dropout.state.dtype)));
  }
  if (check_input(report, "dropout.state", dropout.state, "[4]", 1, Inner::any) && dropout.state.extent(0) != 4) {
    report.add("dropout.state.shape[0]", "4", std::to_string(dropout.state.extent(0)));
  }
}

void check_sinks(Report& report, const Problem& problem, const Sizes& sizes) {
  if (!given(problem.sinks)) return;
  const bool shape_ok = check_input(report, "sinks", problem.sinks, "[heads]", 1, Inner::any);
  if (problem.sinks.dtype != DType::f32) {
    report.add("sinks.dtype", "fp32", std::string(name(problem.sinks.dtype)));
  }
  if (shape_ok && sizes.known) check_equal_extent(report, "sinks", problem.sinks, 0, "heads", problem.q.extent(1));
}

void check_block_table(Report& report, const Problem& problem) {
  const ConstTensorView& table = problem.block_table;
  if (!given(table)) return;
  const bool shape_ok = check_input(report, "block_table", table, "[batch, blocks]", 2, Inner::any);
  if (table.dtype != DType::i32) report.add("block_table.dtype", "int32", std::string(name(table.dtype)));
  if (problem.packed) report.add("block_table", "none for a packed batch", "one");
  if (!shape_ok || problem.q.rank != 4 || problem.k.rank != 4) return;
  check_equal_extent(report, "block_table", table, 0, "q's batch", problem.q.extent(0));
  constexpr std::int64_t kPageUnit = 16;
  if (problem.k.extent(2) < kPageUnit || problem.k.extent(2) % kPageUnit != 0) {
    report.add("k.shape[2]", "a page size that is a multiple of 16", std::to_string(problem.k.extent(2)));
  }
  if (table.extent(1) > kUnbounded / std::max<std::int64_t>(problem.k.extent(2), 1)) {
    report.add("block_table.shape[1]", "blocks of at most 2^40 keys", std::to_string(table.extent(1)));
  }
}

void check_value_sums(Report& report, const Problem& problem, const Sizes& sizes) {
  const ConstTensorView& sums = problem.value_sums;
  if (!given(sums)) return;
  if (problem.rest != Rest::mean) report.add("value_sums", "none with rest = drop", "some");
  if (problem.packed) report.add("value_sums", "none for a packed batch", "some");
  const bool shape_ok =
      check_input(report, "value_sums", sums, "[batch, kv_heads, 2 * blocks, d_v + 1]", 4, Inner::contiguous);
  if (shape_ok && sizes.known) {
    check_sums_shape(report, "value_sums", sums, sizes.batch, problem.v.extent(1), sizes.n_k, problem.v.extent(3));
  }
}

// A number from elsewhere that is none of the enumerators would pass for one of them.
template <typename Enum>
void check_enumerator(Report& report, const char* argument, Enum value, Enum last, const char* expected) {
  if (value > last) report.add(argument, expected, "number " + std::to_string(static_cast<int>(value)));
}

void check_enumerators(Report& report, const Problem& p) {
  check_enumerator(report, "device.type", p.device.type, DeviceType::cuda, "cpu or cuda");
  check_enumerator(report, "grouping", p.grouping, Grouping::interleaved, "consecutive or interleaved");
  check_enumerator(report, "mask.alignment", p.mask.alignment, Alignment::top_left, "bottom_right or top_left");
  check_enumerator(report, "fp32_products", p.fp32_products, Fp32Products::full, "tf32_allowed or full");
  check_enumerator(report, "rest", p.rest, Rest::mean, "drop or mean");
  check_enumerator(report, "choice", p.choice, Choice::shared, "each_head or shared");
}

void check_soft_cap(Report& report, const Problem& problem) {
  if (!problem.soft_cap) return;
  if (!(*problem.soft_cap >= kLeastScale && *problem.soft_cap <= kLargestScale)) {
    report.add("soft_cap", "a finite, positive number from 2^-126 to 2^126", number(*problem.soft_cap));
  }
}

}  // namespace

void check_sums_shape(Report& report, std::string_view argument, const ConstTensorView& sums, std::int64_t batch,
                      std::int64_t kv_heads, std::int64_t n_k, std::int64_t d_v) {
  if (sums.dtype != DType::f32) {
    report.add(std::string(argument) + ".dtype", "fp32", std::string(name(sums.dtype)));
  }
  const std::string text(argument);
  check_equal_extent(report, text.c_str(), sums, 0, "batch", batch);
  check_equal_extent(report, text.c_str(), sums, 1, "v's kv_heads", kv_heads);
  check_equal_extent(report, text.c_str(), sums, 3, "v's d_v + 1", d_v + 1);
  const std::int64_t least = 2 * (n_k / kMeanBlock);
  if (sums.extent(2) < least || sums.extent(2) % 2 != 0) {
    report.add(text + ".shape[2]", "an even number from 2 * (n_k / 128) = " + std::to_string(least) + " on",
               std::to_string(sums.extent(2)));
  }
}

void check_problem(Report& report, const Problem& problem) {
  check_enumerators(report, problem);
  if (problem.device.index < 0 || (problem.device.type == DeviceType::cpu && problem.device.index != 0)) {
    report.add("device.index", problem.device.type == DeviceType::cpu ? "0 for the CPU" : ">= 0",
               std::to_string(problem.device.index));
  }
  Sizes sizes;
  check_block_table(report, problem);
  if (check_qkv(report, problem) && (!given(problem.block_table) || problem.block_table.rank == 2)) {
    if (problem.packed) check_packed(report, problem);
    const bool packed_known = !problem.packed || (problem.packed->cu_q.rank == 1 && problem.packed->cu_q.extent(0) > 0);
    if (packed_known) sizes = sizes_of(problem);
  }
  check_pattern(report, problem);
  check_scale(report, problem);
  check_mask(report, problem, sizes);
  check_rest(report, problem);
  check_value_sums(report, problem, sizes);
  check_dropout(report, problem.dropout);
  check_soft_cap(report, problem);
  check_sinks(report, problem, sizes);
}

void check_lengths(Report& report, const Problem& problem) {
  if (problem.device.type != DeviceType::cpu) return;
  if (problem.packed) check_packed(report, problem);
  check_key_lengths(report, problem, sizes_of(problem));
}

}  // namespace dspattn::core
