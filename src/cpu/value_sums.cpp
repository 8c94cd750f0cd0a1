#include "cpu/value_sums.h"

#include <algorithm>
#include <cstdint>

#include "core/geometry.h"
#include "core/half.h"
#include "core/value_sums_check.h"

namespace dspattn::cpu {
namespace {

using core::kMeanBlock;

// Element of V at which a sequence's key begins; negative: the key is in no page.
std::int64_t row_of(const ValueSumsArgs& args, std::int64_t sequence, std::int64_t head, std::int64_t key) {
  const ConstTensorView& v = args.v;
  std::int64_t place = sequence, row = key;
  if (args.block_table.present()) {
    const std::int64_t page_size = v.extent(2);
    place = static_cast<const std::int32_t*>(
        args.block_table.data)[sequence * args.block_table.step(0) + key / page_size * args.block_table.step(1)];
    row = key % page_size;
    if (place < 0 || place >= v.extent(0)) return -1;
  }
  return place * v.step(0) + head * v.step(1) + row * v.step(2);
}

// The sum of one block and of all up to it.
void update_block(const ValueSumsArgs& args, std::int64_t sequence, std::int64_t head, std::int64_t block) {
  const std::int64_t columns = args.v.extent(3), step = args.sums.step(2);
  float* own =
      static_cast<float*>(args.sums.data) + sequence * args.sums.step(0) + head * args.sums.step(1) + 2 * block * step;
  std::fill(own, own + columns + 1, 0.0f);
  for (std::int64_t key = block * kMeanBlock; key < (block + 1) * kMeanBlock; ++key) {
    const std::int64_t row = row_of(args, sequence, head, key);
    if (row < 0) continue;
    for (std::int64_t c = 0; c < columns; ++c) {
      own[c] += static_cast<float>(core::load_element(args.v.data, args.v.dtype, row + c));
    }
    own[columns] += 1;
  }
  for (std::int64_t c = 0; c <= columns; ++c) own[step + c] = own[c] + (block > 0 ? own[c - step] : 0.0f);
}

}  // namespace

void update_value_sums(const ValueSumsArgs& args) {
  const core::SumsExtents extents = core::extents_of(args);
  const auto* lengths = static_cast<const std::int32_t*>(args.key_lengths.data);
  for (std::int64_t s = 0; s < extents.batch; ++s) {
    const std::int64_t length = lengths == nullptr ? extents.n_k : lengths[s * args.key_lengths.step(0)];
    const std::int64_t first = std::max<std::int64_t>(length - args.new_keys, 0) / kMeanBlock;
    for (std::int64_t h = 0; h < args.v.extent(1); ++h) {
      for (std::int64_t block = first; block < length / kMeanBlock; ++block) update_block(args, s, h, block);
    }
  }
}

}  // namespace dspattn::cpu
