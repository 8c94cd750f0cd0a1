#include "cuda/sm90/forward_tf32/plan.h"

#include <algorithm>
#include <utility>

#include "core/geometry.h"
#include "cuda/sm90/forward_tf32/config.h"
#include "cuda/tile/head_dims.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::sm90::tf32 {
namespace {

template <int kDim>
VariantTraits traits_at(Variant variant) {
  if (variant == Variant::narrow) return traits_from<Config<kDim, Variant::narrow>>();
  if (variant == Variant::general) return traits_from<Config<general_dim(kDim), Variant::general>>();
  if constexpr (has_wide(kDim)) {
    if (variant == Variant::wide) return traits_from<Config<kDim, Variant::wide>>();
  }
  return {};
}

}  // namespace

VariantTraits traits_of(int dim, Variant variant) {
  return tile::at_head_dim(dim, [&]<int kDim>() { return traits_at<kDim>(variant); });
}

ForwardPlan plan_forward(int dim, const Problem& problem, const TensorView& out, const DeviceFacts& device) {
  const ForwardQuestion question(problem, out);
  ForwardPlan plan;
  look_at_tensors(question, plan);
  // K and V: one key of each pair of a tile at once.
  plan.tma_k = blocks::rows_shape(rows_of(problem.k), extents_of(problem.k), DType::f32, 1, 1).has_value();
  plan.tma_v = blocks::rows_shape(rows_of(problem.v), extents_of(problem.v), DType::f32, 1, 1).has_value();
  const auto items_of = [&](const VariantTraits& traits) {
    return question.sequence_heads() * tile::divide_up(question.geometry.n_q, traits.tile_q);
  };
  const VariantTraits wide = traits_of(dim, Variant::wide);
  const std::int64_t enough = std::int64_t{kWideItemsPerMultiprocessor} * device.multiprocessors;
  if (std::string need = needs_general(question, plan); !need.empty()) {
    plan.variant = Variant::general;
    plan.reason = std::move(need);
  } else if (wide.compiled && items_of(wide) >= enough) {
    plan.variant = Variant::wide;
    plan.reason = "at least " + std::to_string(enough) + " items of " + std::to_string(wide.tile_q) + " rows";
  } else {
    plan.variant = Variant::narrow;
    plan.reason = wide.compiled
                      ? "fewer than " + std::to_string(enough) + " items of " + std::to_string(wide.tile_q) + " rows"
                      : "the only one for aligned tensors at this head dim";
  }
  plan.traits = traits_of(dim, plan.variant);
  plan.items = items_of(plan.traits);
  plan.ctas = static_cast<int>(std::min<std::int64_t>(plan.items, device.multiprocessors));
  plan.threads = 128 * (plan.traits.consumers + 1);
  plan.stages = plan.traits.stages;
  plan.partial_blocks = question.scheduled || question.geometry.n_k % tile::kBlockKeys != 0;
  choose_order(question, plan.traits.tile_q, plan.ctas, plan);
  return plan;
}

bool yields(int dim, const Problem& problem, const DeviceFacts& device) {
  constexpr std::int64_t kLeastRows = 512, kLeastCausalRows = 2048, kGeneralRows = 128;
  const core::Geometry geometry = core::geometry_of(problem);
  if (dim != 256 || std::min(geometry.n_q, geometry.n_k) < kLeastRows || problem.packed) return false;
  const Mask& mask = problem.mask;
  const core::Band band = core::band_of(mask);
  if (mask.key_lengths.present() || mask.allowed.present() || mask.bias.present()) return false;
  const std::int64_t ctas = geometry.batch * geometry.heads * tile::divide_up(geometry.n_q, kGeneralRows);
  const auto multiprocessors = static_cast<std::int64_t>(device.multiprocessors);
  // Nine tenths: 128 CTAs on 132 multiprocessors are faster.
  if (std::min(band.left, band.right) >= core::kUnbounded) return 10 * ctas >= 9 * multiprocessors;
  // Under a diagonal, where CTAs are unequal: 512 are (docs/log/general.md).
  const bool whole_triangle = band.left >= core::kUnbounded && band.right + band.offset == 0;
  return whole_triangle && geometry.n_q == geometry.n_k && geometry.n_q >= kLeastCausalRows &&
         2 * ctas >= 7 * multiprocessors;
}

}  // namespace dspattn::cuda::sm90::tf32
