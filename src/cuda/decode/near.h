// What a CTA reads first is brought to the L2 cache before inputs may be read: the kernels before still run then, and
// memory is short of work while the last of their CTAs end. Results do not depend on it: what is written later is
// written to the same cache.
#pragma once

#include "cuda/decode/load.h"
#include "cuda/decode/part.h"

namespace dspattn::cuda::decode {

// The first rows of K of a part, and of V where all of it will be read. By all threads.
template <typename C>
__device__ __forceinline__ void bring_first_near(const Params& p, const Part& part, bool with_v) {
  if (p.near_bytes == 0 || p.pages.table != nullptr || p.k_row_bytes == 0 || p.v_row_bytes == 0) return;
  const int keys = p.near_bytes / (C::kHeadDim * C::kElementBytes * (with_v ? 2 : 1));
  const int first = max(part.tiles.begin * C::kTileK, part.begin);
  const int end = min(min(first + keys, part.tiles.end * C::kTileK), part.end);
  const auto bring = [&](const blocks::RowsView& view, std::uint32_t row_bytes, int columns) {
    const auto* rows = reinterpret_cast<const std::uint8_t*>(static_cast<const Bits<C>*>(view.data) +
                                                             view.offset(part.batch, part.kv_head, first));
    const int lines = (end - first) * C::kPanels;
    for (int line = static_cast<int>(threadIdx.x); line < lines; line += 32 * p.teams.cta_warps()) {
      const int at = line % C::kPanels * 128;
      if (at < columns * C::kElementBytes) ptx::bring_near(rows + line / C::kPanels * std::uint64_t{row_bytes} + at);
    }
  };
  bring(p.k, p.k_row_bytes, p.d);
  if (with_v) bring(p.v, p.v_row_bytes, p.results.out.columns);
}

}  // namespace dspattn::cuda::decode
