#include "cpu/tail.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace dspattn::cpu {
namespace {

std::int64_t end_of(const ConstTensorView& cumulative) {
  const std::int64_t last = (cumulative.extent(0) - 1) * cumulative.step(0);
  return static_cast<const std::int32_t*>(cumulative.data)[last];
}

// Calls write(row) with the address of every row from `begin` on, of the one batch entry that a packed batch has.
template <typename Write>
void each_row(const TensorView& view, std::int64_t begin, Write write) {
  const auto size = static_cast<std::int64_t>(size_bytes(view.dtype));
  for (std::int64_t head = 0; head < view.extent(1); ++head) {
    for (std::int64_t row = begin; row < view.extent(2); ++row) {
      write(static_cast<std::byte*>(view.data) + (head * view.step(1) + row * view.step(2)) * size);
    }
  }
}

void clear_from(const TensorView& view, std::int64_t begin) {
  const std::size_t bytes = static_cast<std::size_t>(view.extent(3)) * size_bytes(view.dtype);
  each_row(view, begin, [&](std::byte* row) { std::memset(row, 0, bytes); });
}

}  // namespace

void finish_tail(const ForwardArgs& args) {
  if (!args.problem.packed) return;
  const std::int64_t end = end_of(args.problem.packed->cu_q);
  clear_from(args.out, end);
  if (!args.lse.present()) return;
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  each_row(args.lse, end, [&](std::byte* row) { std::memcpy(row, &kEmpty, sizeof(kEmpty)); });
}

void finish_tail(const BackwardArgs& args) {
  if (!args.problem.packed) return;
  clear_from(args.d_q, end_of(args.problem.packed->cu_q));
  const std::int64_t end = end_of(args.problem.packed->cu_k);
  clear_from(args.d_k, end);
  clear_from(args.d_v, end);
}

}  // namespace dspattn::cpu
