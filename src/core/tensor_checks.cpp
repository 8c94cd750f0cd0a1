#include "core/tensor_checks.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>

namespace dspattn::core {
namespace {

std::string list_text(const std::array<std::int64_t, kMaxRank>& values, int rank) {
  std::string text = "[";
  for (int i = 0; i < std::clamp(rank, 0, kMaxRank); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(values[static_cast<std::size_t>(i)]);
  }
  return text + "]";
}

bool is_empty(const ConstTensorView& view) {
  for (int i = 0; i < view.rank; ++i) {
    if (view.extent(i) == 0) return true;
  }
  return false;
}

// Bytes from the first element to the end of the last; -1 when that or the element count exceeds 63 bits.
std::int64_t span_bytes(const ConstTensorView& view) {
  std::int64_t last = 0;
  std::int64_t count = 1;
  bool overflow = false;
  for (int i = 0; i < view.rank; ++i) {
    std::int64_t step = 0;
    overflow = overflow || __builtin_mul_overflow(view.extent(i) - 1, view.step(i), &step) ||
               __builtin_add_overflow(last, step, &last) || __builtin_mul_overflow(count, view.extent(i), &count);
  }
  std::int64_t bytes = 0;
  const std::int64_t size = static_cast<std::int64_t>(size_bytes(view.dtype));
  overflow = overflow || last == std::numeric_limits<std::int64_t>::max() ||
             __builtin_mul_overflow(last + 1, size, &bytes) || __builtin_mul_overflow(count, size, &count);
  return overflow ? -1 : bytes;
}

// Each dimension steps over all that those of no larger stride reach: then no two index tuples meet.
bool nests(const ConstTensorView& view) {
  for (int i = 0; i < view.rank; ++i) {
    if (view.extent(i) <= 1) continue;
    std::int64_t reach = 0;
    for (int j = 0; j < view.rank; ++j) {
      if (j != i && view.extent(j) > 1 && view.step(j) <= view.step(i)) reach += (view.extent(j) - 1) * view.step(j);
    }
    if (view.step(i) <= reach) return false;
  }
  return true;
}

// How far the dimensions of a stride below `limit` reach from an element.
std::int64_t reach_below(const ConstTensorView& view, std::int64_t limit) {
  std::int64_t reach = 0;
  for (int i = 0; i < view.rank; ++i) {
    if (view.step(i) < limit) reach += (view.extent(i) - 1) * view.step(i);
  }
  return reach;
}

// Two views of equal strides that share rows, as d_q, d_k and d_v do in one buffer of [batch, n, 3, heads, d]: there is
// a stride that divides all larger ones, and modulo it the inner parts of the views lie side by side.
bool interleave_apart(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.rank != b.rank || a.dtype != b.dtype) return false;
  const std::int64_t size = static_cast<std::int64_t>(size_bytes(a.dtype));
  const std::int64_t distance_bytes = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(b.data)) -
                                      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(a.data));
  if (distance_bytes % size != 0) return false;
  std::vector<std::int64_t> strides;
  for (int i = 0; i < a.rank; ++i) {
    if (std::max(a.extent(i), b.extent(i)) == 1) continue;
    if (a.step(i) != b.step(i)) return false;
    if (a.step(i) > 0) strides.push_back(a.step(i));
  }
  return std::any_of(strides.begin(), strides.end(), [&](std::int64_t row) {
    const bool divides = std::all_of(strides.begin(), strides.end(),
                                     [&](std::int64_t stride) { return stride < row || stride % row == 0; });
    const std::int64_t distance = ((distance_bytes / size) % row + row) % row;
    return divides && reach_below(a, row) < distance && distance + reach_below(b, row) < row;
  });
}

}  // namespace

std::string shape_text(const ConstTensorView& view) { return list_text(view.shape, view.rank); }
std::string stride_text(const ConstTensorView& view) { return list_text(view.stride, view.rank); }

std::string hex(const void* address) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", address);
  return text;
}

bool check_input(Report& report, std::string_view argument, const ConstTensorView& view, const char* layout, int rank,
                 Inner inner) {
  if (view.rank != rank) {
    report.add(argument, "rank " + std::to_string(rank) + " " + layout,
               "rank " + std::to_string(view.rank) + " " + shape_text(view));
    return false;
  }
  if (size_bytes(view.dtype) == 0) {
    report.add(std::string(argument) + ".dtype", "one of DType's",
               "number " + std::to_string(static_cast<int>(view.dtype)));
    return false;
  }
  bool usable = true;
  for (int i = 0; i < rank; ++i) {
    if (view.extent(i) < 0) {
      report.add(std::string(argument) + ".shape[" + std::to_string(i) + "]", "an extent >= 0",
                 std::to_string(view.extent(i)));
      usable = false;
    }
  }
  if (!usable) return false;
  if (is_empty(view)) return true;  // nothing is read or written: strides and data mean nothing

  for (int i = 0; i < rank; ++i) {
    if (view.extent(i) > 1 && view.step(i) < 0) {
      report.add(std::string(argument) + ".stride[" + std::to_string(i) + "]", "a stride >= 0",
                 std::to_string(view.step(i)));
      usable = false;
    }
  }
  if (inner == Inner::contiguous && view.extent(rank - 1) > 1 && view.step(rank - 1) != 1) {
    report.add(std::string(argument) + ".stride[" + std::to_string(rank - 1) + "]", "1 (contiguous last dimension)",
               std::to_string(view.step(rank - 1)));
  }
  if (usable && span_bytes(view) < 0) {
    report.add(argument, "a tensor whose size fits in 63 bits",
               "shape " + shape_text(view) + " with strides " + stride_text(view));
    return false;
  }
  if (view.data == nullptr) {
    report.add(std::string(argument) + ".data", "the address of shape " + shape_text(view), "null");
  } else if (reinterpret_cast<std::uintptr_t>(view.data) % size_bytes(view.dtype) != 0) {
    report.add(std::string(argument) + ".data",
               "an address aligned to " + std::to_string(size_bytes(view.dtype)) + " bytes for " +
                   std::string(name(view.dtype)),
               hex(view.data));
  }
  return usable;
}

bool check_output(Report& report, std::string_view argument, const ConstTensorView& view, const char* layout, int rank,
                  Inner inner) {
  if (!check_input(report, argument, view, layout, rank, inner)) return false;
  if (is_empty(view)) return true;
  if (!nests(view)) {
    report.add(std::string(argument) + ".stride",
               "strides that give each element of shape " + shape_text(view) + " its own place", stride_text(view));
  }
  return true;
}

void check_apart(Report& report, std::string_view output, const ConstTensorView& output_view, std::string_view other,
                 const ConstTensorView& other_view) {
  if (!output_view.present() || !other_view.present() || is_empty(output_view) || is_empty(other_view)) return;
  const auto first_begin = reinterpret_cast<std::uintptr_t>(output_view.data);
  const auto second_begin = reinterpret_cast<std::uintptr_t>(other_view.data);
  const auto first_end = first_begin + static_cast<std::uintptr_t>(span_bytes(output_view));
  const auto second_end = second_begin + static_cast<std::uintptr_t>(span_bytes(other_view));
  if (first_end <= second_begin || second_end <= first_begin || interleave_apart(output_view, other_view)) return;
  report.add(output,
             "memory apart from " + std::string(other) + " (" + hex(other_view.data) + ", " +
                 std::to_string(second_end - second_begin) + " bytes)",
             hex(output_view.data) + ", " + std::to_string(first_end - first_begin) + " bytes");
}

}  // namespace dspattn::core
