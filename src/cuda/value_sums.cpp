#include "cuda/value_sums.h"

#include <algorithm>

#include "core/value_sums_check.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/blocks/value_sums.h"
#include "cuda/device/device.h"
#include "cuda/tile/value_sums.h"

namespace dspattn::cuda {

void update_value_sums(const ValueSumsArgs& args) {
  const DeviceFacts& device = device_facts(args.device.index);
  if (!device.present) throw Error("device: " + device.absence);
  const core::SumsExtents extents = core::extents_of(args);
  const std::int64_t kv_heads = args.v.extent(1);
  blocks::ValueSumsParams p;
  p.n_k = static_cast<int>(extents.n_k);
  p.new_keys = static_cast<int>(std::min(args.new_keys, extents.n_k));
  const int blocks = tile::most_blocks_to_sum(p.n_k, p.new_keys);
  if (extents.batch == 0 || kv_heads == 0 || blocks == 0) return;
  p.values = {blocks::rows_of(args.v), blocks::pages_of(args.block_table, args.v), args.v.dtype,
              static_cast<int>(args.v.extent(3))};
  p.sums = blocks::sums_of(args.sums);
  p.key_lengths = blocks::lengths_of(args.key_lengths);
  p.heads = tile::Divisor(static_cast<int>(kv_heads));
  p.vector = blocks::is_vector(args.v) && args.v.dtype != DType::f32 ? 1 : 0;
  // New keys of a step lie in two blocks at most: one CTA, which needs no kernel after it.
  constexpr int kFewBlocks = 2;
  p.chunks = tile::Divisor(blocks <= kFewBlocks ? 1 : blocks);
  const CurrentDevice current(args.device.index);
  blocks::launch_value_sums(p, static_cast<int>(extents.batch), static_cast<cudaStream_t>(args.stream));
}

}  // namespace dspattn::cuda
