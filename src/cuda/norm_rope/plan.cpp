#include "cuda/norm_rope/plan.h"

#include <algorithm>
#include <bit>

namespace dspattn::cuda::norm_rope_kernel {
namespace {

constexpr std::uintptr_t kAligned = 16;

bool aligned(const ConstTensorView& view) {
  if (reinterpret_cast<std::uintptr_t>(view.data) % kAligned != 0) return false;
  const auto size = static_cast<std::int64_t>(size_bytes(view.dtype));
  for (int dim = 0; dim + 1 < view.rank; ++dim) {
    if (view.extent(dim) > 1 && view.step(dim) * size % static_cast<std::int64_t>(kAligned) != 0) return false;
  }
  return true;
}

template <typename View>
HeadsView heads_of(const View& view) {
  return {const_cast<void*>(static_cast<const void*>(view.data)), view.step(0), view.step(1), view.step(2)};
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

Plan plan_of(const NormRopeArgs& args) {
  Plan plan;
  Params& p = plan.params;
  p.norm = args.eps ? 1 : 0;
  p.eps = static_cast<float>(args.eps.value_or(0.0));
  plan.vector = aligned(args.cos) && aligned(args.sin);
  for (const NormRopePart& given : args.parts) {
    if (given.x.elements() == 0) continue;
    p.d = static_cast<int>(given.x.extent(3));
    p.inverse_d = 1.0f / static_cast<float>(p.d);
    p.lanes = static_cast<int>(std::bit_ceil(static_cast<unsigned>((p.d + kWidth - 1) / kWidth)));
    plan.type = given.x.dtype;
    plan.vector = plan.vector && p.d % kWidth == 0 && aligned(given.x) && aligned(given.out) && aligned(given.weight);
    Part& part = p.parts[p.part_count++];
    part.x = heads_of(given.x);
    part.out = heads_of(given.out);
    part.weight = given.weight.data;
    part.tokens = static_cast<int>(given.x.extent(1));
    part.heads = static_cast<int>(given.x.extent(2));
    part.token_blocks = static_cast<int>(ceil_div(part.tokens, kThreads / p.lanes));
    part.head_blocks = static_cast<int>(ceil_div(part.heads, kHeadsOfCta));
    part.first_position = given.first_position;
    part.first_cta = static_cast<int>(std::min<std::int64_t>(plan.ctas, INT32_MAX));  // beyond, the launch throws
    plan.ctas += given.x.extent(0) * part.token_blocks * part.head_blocks;
  }
  if (args.cos.data == nullptr) return plan;  // columns are then as they lie in memory
  plan.pairs = args.pairs;
  p.cos = {static_cast<const float*>(args.cos.data), args.cos.step(0)};
  p.sin = {static_cast<const float*>(args.sin.data), args.sin.step(0)};
  return plan;
}

}  // namespace dspattn::cuda::norm_rope_kernel
