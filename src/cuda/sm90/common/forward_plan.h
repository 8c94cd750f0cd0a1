// How a fused forward kernel will serve a problem: every decision of the host. plan.h makes plans; this header is all
// that launches need of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/blocks/means_params.h"
#include "cuda/sm90/common/variant.h"
#include "cuda/tile/walk.h"

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
  bool writes_means = false;  // warps of its producer can write means of V
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
  std::size_t workspace_bytes = 0;  // of the schedule and the means

  blocks::MeansPlan means;  // rest = mean
};

}  // namespace dspattn::cuda::sm90
