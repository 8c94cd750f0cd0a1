#include "cuda/sm90/common/plan.h"

#include <algorithm>
#include <sstream>

namespace dspattn::cuda::sm90 {
namespace {

const char* name_of(Walk walk) {
  switch (walk) {
    case Walk::head_by_head:
      return "head by head";
    case Walk::mirrored:
      return "head by head, every other sweep mirrored";
    case Walk::by_sections:
      return "by sections of heads, last row tiles first";
    case Walk::schedule:
      return "from a schedule that the device writes, longest sequences first";
  }
  return "";
}

}  // namespace

ForwardQuestion::ForwardQuestion(const Problem& p, const TensorView& o)
    : problem(p),
      out(o),
      geometry(core::geometry_of(p)),
      band(core::band_of(p.mask)),
      full(tile::clamped_reach(band.left) == tile::kMaxRows && tile::clamped_reach(band.right) == tile::kMaxRows),
      scheduled(p.packed.has_value() || p.mask.key_lengths.present()) {}

std::int64_t ForwardQuestion::mean_rows() const {
  return problem.packed ? problem.q.extent(2) / std::max<std::int64_t>(geometry.batch, 1) : geometry.n_q;
}

blocks::Extents extents_of(const ConstTensorView& tensor) {
  return {tensor.extent(0), tensor.extent(1), tensor.extent(2), tensor.extent(3)};
}

blocks::Extents mask_extents(const core::Geometry& geometry) {
  return {geometry.batch, geometry.heads, geometry.n_q, geometry.n_k};
}

void look_at_tensors(const ForwardQuestion& question, ForwardPlan& plan) {
  const Problem& problem = question.problem;
  plan.vector_q = blocks::is_vector(problem.q);
  plan.vector_k = blocks::is_vector(problem.k);
  plan.vector_v = blocks::is_vector(problem.v);
  plan.vector_out = blocks::is_vector(question.out);
  const DType type = problem.q.dtype;
  plan.tma_q = blocks::rows_shape(rows_of(problem.q), extents_of(problem.q), type, 1, 1).has_value();
  // Results in another type than the inputs' leave from registers (blocks/sink.h).
  plan.tma_out = question.out.dtype == type &&
                 blocks::rows_shape(rows_of(question.out), extents_of(question.out), type, 1, 1).has_value();
  const Mask& mask = problem.mask;
  const auto can_load = [&](const ConstTensorView& tensor) {
    return !tensor.present() || blocks::mask_shape(mask_of(tensor), mask_extents(question.geometry),
                                                   static_cast<int>(size_bytes(tensor.dtype)))
                                    .has_value();
  };
  plan.tma_masks = can_load(mask.allowed) && can_load(mask.bias);
}

std::string needs_general(const ForwardQuestion& question, const ForwardPlan& plan) {
  const Mask& mask = question.problem.mask;
  if (mask.allowed.present() || mask.bias.present()) return "mask tensors";
  if (!plan.tma_q || !plan.tma_k || !plan.tma_v) return "q, k or v: not for TMA (base and strides of 16 bytes)";
  if (!plan.vector_k || !plan.vector_v || !plan.vector_out) return "k, v or out: rows that are no multiple of 16 bytes";
  return {};
}

void choose_order(const ForwardQuestion& question, int tile_q, int workers, ForwardPlan& plan) {
  const core::Geometry& geometry = question.geometry;
  const int sequence_heads = static_cast<int>(question.sequence_heads());
  const int row_tiles = tile::divide_up(geometry.n_q, tile_q);
  if (!question.scheduled && (question.full || row_tiles == 1)) {
    // The last row tile of a head is shorter: only tiles of 192 rows have code for that (Config::kShortLast).
    const bool short_last = tile_q % 128 != 0 && geometry.n_q % tile_q != 0;
    plan.order = tile::equal_order(sequence_heads, row_tiles, workers, short_last);
    plan.walk = Walk::head_by_head;
    return;
  }
  // Short sequences at large head dims are short of memory bandwidth: measured 8 to 15 % faster with all row tiles of a
  // head at once, up to 15 % slower at d = 64 (docs/log/forward.md).
  const bool mirrored =
      row_tiles <= kMirroredRowTiles && std::max(geometry.d, geometry.d_v) > 64 && !question.problem.packed;
  plan.walk = mirrored ? Walk::mirrored : Walk::by_sections;
  plan.order = mirrored ? tile::mirrored_order(sequence_heads, row_tiles, workers)
                        : tile::unequal_order(sequence_heads, row_tiles,
                                              static_cast<int>(geometry.heads / geometry.kv_heads), workers, tile_q);
}

std::string to_string(const ForwardPlan& plan) {
  const auto yes = [](bool x) { return x ? "yes" : "no"; };
  std::ostringstream text;
  text << "variant     " << name_of(plan.variant) << ", compiled for d = " << plan.traits.dim << ": " << plan.reason
       << "\nCTA         " << plan.traits.tile_q << " query rows by " << plan.traits.consumers
       << " consumer warpgroups, key tiles of " << plan.traits.tile_k << ", " << plan.stages << " stages"
       << "\nitems       " << (plan.walk == Walk::schedule ? "up to " : "") << plan.items << ", " << name_of(plan.walk)
       << (plan.pairs ? ", by pairs of CTAs" : "") << "\nkey blocks  "
       << (plan.descending ? "last to first" : "first to last")
       << (plan.partial_blocks ? ", some may be partial" : ", all whole") << "\nTMA         q " << yes(plan.tma_q)
       << ", k " << yes(plan.tma_k) << ", v " << yes(plan.tma_v) << ", out " << yes(plan.tma_out) << "\nlaunch      "
       << plan.ctas << " CTAs of " << plan.threads << " threads" << (plan.pairs ? ", clusters of 2" : "")
       << (plan.overlaps ? ", overlapping the kernel before" : "") << "\nworkspace   " << plan.workspace_bytes
       << " bytes" << (plan.means.present ? ", with means of V for the weight of pruned keys" : "")
       << (plan.means.own ? ", which the kernel writes itself" : "");
  return text.str();
}

}  // namespace dspattn::cuda::sm90
