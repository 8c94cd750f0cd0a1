// How a fused forward kernel will serve a problem: every decision of the host, made by a pure function of the problem
// and the device (plan_forward of each kernel's folder), printed by `dspattn kernels`. Launching only fills parameters
// from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/geometry.h"
#include "cuda/blocks/tma_shapes.h"
#include "cuda/device/facts.h"
#include "cuda/sm90/common/variant.h"
#include "cuda/tile/walk.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::sm90 {

// What a variant was compiled with.
struct VariantTraits {
  bool compiled = false;
  int dim = 0;  // head dim it is compiled for
  int tile_q = 0, tile_k = 0;
  int consumers = 0;  // warpgroups
  int stages = 0;
  bool may_pair = false;      // pairs of CTAs are possible
  bool may_descend = false;   // key blocks may be loaded from the last down
  bool spares_stage = false;  // short items do with a stage less
};

// The order in which items are taken (tile/walk.h, tile/schedule.h).
enum class Walk : std::uint8_t { head_by_head, mirrored, by_sections, schedule };

struct ForwardPlan {
  Variant variant = Variant::general;
  VariantTraits traits;
  std::string reason;  // why this variant

  // What TMA can address, and rows that are 16-byte aligned.
  bool tma_q = false, tma_k = false, tma_v = false, tma_out = false, tma_masks = false;
  bool vector_q = false, vector_k = false, vector_v = false, vector_out = false;

  Walk walk = Walk::head_by_head;
  tile::ItemOrder order;        // of a schedule: of nobody
  std::int64_t items = 0;       // with a schedule at most
  bool pairs = false;           // CTAs work in pairs that share their loads of K and V
  bool overlaps = false;        // may start while the kernel before still runs
  bool short_items = false;     // every item has one key block, or two
  bool descending = false;      // key blocks from the last down to the first
  bool partial_blocks = false;  // a sequence may end within a key block

  int ctas = 0;
  int threads = 0;
  int stages = 0;                   // in use
  std::size_t workspace_bytes = 0;  // of the schedule
};

std::string to_string(const ForwardPlan& plan);

// What plans of all fused forward kernels ask of a problem.
struct ForwardQuestion {
  const Problem& problem;
  TensorView out;  // the output; where it is not known yet, a contiguous one
  core::Geometry geometry;
  core::Band band;
  bool full = false;       // every row sees all keys of its sequence
  bool scheduled = false;  // sequences whose lengths only the device knows

  ForwardQuestion(const Problem& p, const TensorView& o);
  // Query rows of a sequence; of a packed batch, the mean.
  std::int64_t mean_rows() const;
  std::int64_t sequence_heads() const { return geometry.batch * geometry.heads; }
};

blocks::RowsView rows_of(const ConstTensorView& tensor);
blocks::MaskTensor mask_of(const ConstTensorView& tensor);
blocks::Extents extents_of(const ConstTensorView& tensor);
// Extents of a mask tensor of the whole problem.
blocks::Extents mask_extents(const core::Geometry& geometry);

// A stand-in for an output that nobody has given yet: contiguous and aligned.
TensorView contiguous_out(const Problem& problem);

// Fills in vector_*, and whether TMA can address Q, the output and the mask tensors; K and V are the kernel's own.
void look_at_tensors(const ForwardQuestion& question, ForwardPlan& plan);

// Only the general variant can serve them: mask tensors, tensors that TMA or 16-byte accesses cannot reach. Empty: any
// can.
std::string needs_general(const ForwardQuestion& question, const ForwardPlan& plan);

// Causal masks and windows of up to this many row tiles a head, at d > 64: all of a head's row tiles at once.
inline constexpr int kMirroredRowTiles = 8;

// How `workers` CTAs, or pairs of them, walk tiles of tile_q query rows.
void choose_order(const ForwardQuestion& question, int tile_q, int workers, ForwardPlan& plan);

}  // namespace dspattn::cuda::sm90
