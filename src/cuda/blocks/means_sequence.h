// What the kernels that write means of V (means.h) have in common: where a sequence lies, and what a mean is.
#pragma once

#include "cuda/blocks/means_params.h"
#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::blocks {

// Where a sequence lies and which keys it has.
struct Sequence {
  tile::MeanTable::Sequence place;
  int batch = 0;  // of V
  int rows = 0, keys = 0;
  int key_length = 0;  // of which so many are seen
};

__device__ __forceinline__ Sequence sequence_of(const MeansParams& params, int index) {
  const WorkParams& work = params.work;
  Sequence sequence{{index, 0, 0}, index, work.n_q, work.n_k, 0};
  if (work.cumulative_q.present()) {
    const tile::RowSpan queries = tile::packed_span(work.cumulative_q, index, work.q_rows, work.n_q);
    const tile::RowSpan keys = tile::packed_span(work.cumulative_k, index, work.k_rows, work.n_k);
    sequence = {{index, keys.begin, queries.begin}, 0, queries.count, keys.count, 0};
  }
  sequence.key_length = tile::visible_keys(work.key_lengths, index, sequence.keys);
  return sequence;
}

// The band of keys that its rows see.
DSPATTN_HOST_DEVICE inline tile::RowBand band_of(const WorkParams& work, const Sequence& sequence) {
  return {work.left, work.right, work.offset + (work.bottom_right != 0 ? sequence.keys - sequence.rows : 0),
          sequence.key_length};
}

// What a key has of a mean of so many. A division would be a call, around which registers are spilled.
__device__ __forceinline__ float share_of(int count) { return ptx::reciprocal_fast(static_cast<float>(count)); }

// An entry's number; of no key 0.
__device__ __forceinline__ float mean_of(float sum, int count) { return count > 0 ? sum * share_of(count) : 0.0f; }

// V of a head of a sequence, from its first key on.
template <typename Element>
__device__ __forceinline__ const Element* values_of(const MeansParams& params, const Sequence& sequence, int head) {
  return static_cast<const Element*>(params.v.data) +
         params.v.offset(sequence.batch, params.heads_per_key_head.quotient(head), sequence.place.k_row);
}

// Of a 16-bit type, in the low half of a word; the high half is any.
template <DType kType>
__device__ __forceinline__ float number_of(std::uint32_t low_half) {
  if constexpr (kType == DType::bf16) return __uint_as_float(low_half << 16);
  float low, high;
  ptx::unpack_f16x2(low_half & 0xFFFFu, low, high);
  return low;
}

// Tasks of CTAs: panels of columns of parts of every head of every sequence.
struct PanelTasks {
  tile::Divisor heads, parts, panels;

  std::int64_t count(int sequences) const { return std::int64_t{sequences} * heads.value * parts.value * panels.value; }
};

struct PanelTask {
  int sequence, head, part, panel;

  // From the last sequence to the first, whose V the kernel that follows then finds in the L2 cache.
  __device__ __forceinline__ explicit PanelTask(const PanelTasks& tasks) {
    const auto task = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    const int in_head = tasks.panels.quotient(task);
    const int sequence_head = tasks.parts.quotient(in_head);
    panel = task - in_head * tasks.panels.value;
    part = in_head - sequence_head * tasks.parts.value;
    sequence = tasks.heads.quotient(sequence_head);
    head = sequence_head - sequence * tasks.heads.value;
  }
};

}  // namespace dspattn::cuda::blocks
