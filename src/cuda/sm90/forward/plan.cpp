#include "cuda/sm90/forward/plan.h"

#include <algorithm>
#include <utility>

#include "cuda/blocks/means_plan.h"
#include "cuda/sm90/forward/config.h"
#include "cuda/tile/head_dims.h"
#include "cuda/tile/schedule.h"

namespace dspattn::cuda::sm90 {
namespace {

template <DType kType, Selection kSelection, int kDim>
VariantTraits traits_at(Variant variant) {
  switch (variant) {
    case Variant::wide:
      if constexpr (has_wide(kDim)) return traits_from<Config<kType, kSelection, kDim, Variant::wide>>();
      break;
    case Variant::narrow:
      return traits_from<Config<kType, kSelection, kDim, Variant::narrow>>();
    case Variant::full:
      if constexpr (has_full(kDim)) return traits_from<Config<kType, kSelection, kDim, Variant::full>>();
      break;
    case Variant::general:
      return traits_from<Config<kType, kSelection, general_dim(kDim), Variant::general>>();
  }
  return {};
}

// With rest = mean.
template <DType kType, Selection kSelection, int kDim>
VariantTraits mean_traits_at(Variant variant) {
  constexpr int kMeanDim = mean_dim(kDim);
  switch (variant) {
    case Variant::wide:
      if constexpr (has_mean_wide(kType, kMeanDim)) {
        return traits_from<Config<kType, kSelection, kMeanDim, Build(Variant::wide, true)>>();
      }
      break;
    case Variant::narrow:
      return traits_from<Config<kType, kSelection, kMeanDim, Build(Variant::narrow, true)>>();
    case Variant::full:
      if constexpr (has_mean_full(kType, kMeanDim)) {
        return traits_from<Config<kType, kSelection, kMeanDim, Build(Variant::full, true)>>();
      }
      break;
    case Variant::general:
      return traits_from<Config<kType, kSelection, mean_general_dim(kDim), Build(Variant::general, true)>>();
  }
  return {};
}

template <DType kType, Selection kSelection>
VariantTraits traits_for(int dim, Build build) {
  return tile::at_head_dim(dim, [&]<int kDim>() {
    return build.rest_mean ? mean_traits_at<kType, kSelection, kDim>(build.variant)
                           : traits_at<kType, kSelection, kDim>(build.variant);
  });
}

// The order in which variants are tried, and why one is taken; empty: it is not.
std::string full_because(const ForwardQuestion& question, const VariantTraits& traits, bool pairs) {
  const std::int64_t n_k = question.geometry.n_k;
  const bool whole = !question.scheduled && n_k % tile::kBlockKeys == 0;
  // One key block or two an item: the narrow variant has a buffer for their results.
  if (!traits.compiled || !pairs || !question.full || !whole || n_k <= 2 * tile::kBlockKeys) return {};
  return "every row sees all keys, in whole blocks of 128";
}

}  // namespace

VariantTraits traits_of(const ForwardKernel& kernel, Build build) {
  if (kernel.type == DType::bf16) {
    return kernel.selection == Selection::two_of_four
               ? traits_for<DType::bf16, Selection::two_of_four>(kernel.dim, build)
               : traits_for<DType::bf16, Selection::one_of_two>(kernel.dim, build);
  }
  return kernel.selection == Selection::two_of_four ? traits_for<DType::f16, Selection::two_of_four>(kernel.dim, build)
                                                    : traits_for<DType::f16, Selection::one_of_two>(kernel.dim, build);
}

bool works_in_pairs(const ForwardQuestion& question, int tile_q, int multiprocessors) {
  const core::Geometry& geometry = question.geometry;
  const bool bounded_left = tile::clamped_reach(question.band.left) != tile::kMaxRows;
  const bool bounded_right = tile::clamped_reach(question.band.right) != tile::kMaxRows;
  if (bounded_left || multiprocessors < 2) return false;
  if (question.scheduled) {
    // Two heads' last row tiles may be an item (tile/schedule.h). Measured: 0 to 3 % faster, shorter ones -1 to 2 %.
    return !bounded_right && geometry.heads % 2 == 0 && question.mean_rows() >= kPairedMeanRows;
  }
  // A pair's CTAs take equally long: one idles where the number of row tiles is odd, and for a tile of keys now and
  // then where the mask is causal. Measured: 1 to 4 % faster with 32 row tiles and more, 2 to 4 % slower with 4 or 8.
  // Two are a head in one item, whose time is that of its loads: 2 to 3 % faster.
  const int row_tiles = tile::divide_up(geometry.n_q, tile_q);
  const bool many = std::min<std::int64_t>(row_tiles, geometry.n_k / tile::kBlockKeys) >= kPairedRowTiles;
  const bool whole_heads = row_tiles == 2;
  return many || whole_heads || (!bounded_right && row_tiles % 2 == 0);
}

bool narrow_is_sooner(const ForwardQuestion& question, Pattern pattern, int multiprocessors) {
  if (!question.full || question.scheduled || multiprocessors < 1) return false;
  const std::int64_t heads = question.sequence_heads(), n_q = question.geometry.n_q;
  // Rounds of items: one of 192 rows takes as long as 1.3 of 128, with 1:2 1.25. The last row tile of a head may be
  // shorter; where these alone are left for another round, it ends sooner.
  constexpr int kNarrowRows = 128, kWideRows = 192, kPiece = 64;
  const std::int64_t narrow = tile::divide_up(heads * tile::divide_up(n_q, kNarrowRows), multiprocessors);
  const std::int64_t wide_items = heads * tile::divide_up(n_q, kWideRows);
  const std::int64_t whole_rounds = (wide_items - 1) / multiprocessors;
  const std::int64_t left = wide_items - whole_rounds * multiprocessors;
  const std::int64_t last_rows = n_q - (tile::divide_up(n_q, kWideRows) - 1) * kWideRows;
  const bool short_round = whole_rounds > 0 && left <= heads;
  const std::int64_t wide_thirds = 3 * whole_rounds + (short_round ? tile::divide_up(last_rows, kPiece) : 3);
  const std::int64_t wide_percent = pattern.group == 4 ? 130 : 125;
  return narrow * 300 < wide_thirds * wide_percent;
}

std::int64_t schedule_entries(const ForwardQuestion& question) {
  const core::Geometry& geometry = question.geometry;
  return question.problem.packed ? question.problem.q.extent(2) / tile::kLeastTileRows + geometry.batch
                                 : geometry.batch * tile::divide_up(geometry.n_q, tile::kLeastTileRows);
}

std::size_t schedule_bytes(const ForwardQuestion& question) {
  return question.scheduled ? tile::schedule_bytes(schedule_entries(question)) : 0;
}

ForwardPlan plan_forward(const ForwardKernel& kernel, const Problem& problem, const TensorView& out,
                         const DeviceFacts& device) {
  const ForwardQuestion question(problem, out);
  const core::Geometry& geometry = question.geometry;
  ForwardPlan plan;
  look_at_tensors(question, plan);
  const Pattern pattern = blocks::pattern_of(kernel.selection);
  const bool mean = problem.rest == Rest::mean;
  const auto traits_as = [&](Variant variant) { return traits_of(kernel, {variant, mean}); };
  const tile::KeyMap keys = tile::key_map(pattern, problem.grouping, traits_as(Variant::narrow).tile_k);
  plan.tma_k =
      blocks::k_shape(rows_of(problem.k), extents_of(problem.k), kernel.type, keys, tile::kBlockKeys).has_value();
  plan.tma_v =
      blocks::v_shape(rows_of(problem.v), extents_of(problem.v), kernel.type, keys, tile::kBlockKeys).has_value();

  // The variant: the first that can.
  const auto pairs_of = [&](const VariantTraits& traits) {
    return traits.may_pair && works_in_pairs(question, traits.tile_q, device.multiprocessors);
  };
  const VariantTraits full = traits_as(Variant::full);
  const VariantTraits wide = traits_as(Variant::wide);
  const bool bounded_left = tile::clamped_reach(question.band.left) != tile::kMaxRows;
  const std::int64_t wide_from = wide_from_rows(question.full, pattern, mean && !bounded_left);
  if (std::string need = needs_general(question, plan); !need.empty()) {
    plan.variant = Variant::general;
    plan.reason = std::move(need);
  } else if (std::string because = full_because(question, full, pairs_of(full)); !because.empty() && plan.tma_out) {
    plan.variant = Variant::full;
    plan.reason = std::move(because);
  } else if (wide.compiled && question.mean_rows() >= wide_from &&
             !narrow_is_sooner(question, pattern, device.multiprocessors)) {
    plan.variant = Variant::wide;
    plan.reason = "sequences of " + std::to_string(wide_from) + " query rows and more";
  } else {
    plan.variant = Variant::narrow;
    plan.reason = !wide.compiled ? "the head dim leaves registers for two consumer warpgroups"
                  : question.mean_rows() >= wide_from
                      ? "row tiles of 192 would leave more multiprocessors idle"
                      : "sequences of fewer than " + std::to_string(wide_from) + " query rows";
  }
  plan.traits = traits_as(plan.variant);
  const VariantTraits& traits = plan.traits;
  plan.pairs = pairs_of(traits);

  // Items and who takes them.
  const bool general = plan.variant == Variant::general;
  const int item_rows = traits.tile_q << (plan.pairs ? 1 : 0);
  const int row_tiles = tile::divide_up(geometry.n_q, item_rows);
  plan.items = question.sequence_heads() * row_tiles;
  const int workers = device.multiprocessors >> (plan.pairs ? 1 : 0);  // CTAs or pairs
  // Where all items cost the same, kernels overlap. Where the last row tile is often shorter and cheaper, as one of 192
  // rows is, more CTAs are faster.
  plan.overlaps = plan.pairs && !question.scheduled && (question.full || row_tiles == 1);
  const int used = plan.overlaps ? tile::workers_needed(plan.items, workers)
                                 : static_cast<int>(std::min<std::int64_t>(plan.items, workers));
  plan.ctas = used << (plan.pairs ? 1 : 0);
  plan.threads = 128 * (traits.consumers + 1);
  choose_order(question, item_rows, used, plan);
  plan.workspace_bytes = schedule_bytes(question);
  if (mean) {
    plan.means = blocks::plan_means(problem, tile::clamped_reach(question.band.left),
                                    tile::clamped_reach(question.band.right), traits.dim, plan.workspace_bytes);
    plan.workspace_bytes = plan.means.end;
  }
  if (question.scheduled && !general) plan.walk = Walk::schedule;  // the general variant walks items in order

  // How an item's key blocks are loaded. Those that need masking come first where that is faster: there their code
  // stands in for the first tile's, and the rest is one run. Not under causal masks in general, whose first rows would
  // see few keys to take a reference from.
  plan.short_items = geometry.n_k <= 2 * tile::kBlockKeys;
  plan.partial_blocks = general || question.scheduled || geometry.n_k % tile::kBlockKeys != 0;
  const bool short_causal = traits.may_pair && plan.short_items && !bounded_left && !question.full;
  plan.descending = traits.may_descend && ((question.full && plan.partial_blocks) || short_causal);
  plan.stages = traits.spares_stage && plan.short_items ? traits.stages - 1 : traits.stages;
  return plan;
}

}  // namespace dspattn::cuda::sm90
