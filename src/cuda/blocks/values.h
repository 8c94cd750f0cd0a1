// Rows of V by their keys, in one piece or in pages, of any type and stride.
#pragma once

#include <cstdint>

#include "cuda/blocks/value_sums_params.h"
#include "cuda/ptx/packed_half.h"

namespace dspattn::cuda::blocks {

// V of one key head of a sequence.
struct HeadValues {
  const ValuesView& values;
  int sequence;
  std::int64_t base;  // element of key 0, or of page 0

  __device__ __forceinline__ HeadValues(const ValuesView& view, int its_sequence, int head)
      : values(view),
        sequence(its_sequence),
        base(view.rows.offset(view.pages.table != nullptr ? 0 : its_sequence, head, 0)) {}

  // Element at which a key's row begins; negative: the key is in no page.
  __device__ __forceinline__ std::int64_t row(int key) const {
    if (values.pages.table == nullptr) return base + key * values.rows.row_stride;
    const int page = values.pages.page_of(sequence, key);
    if (page < 0) return -1;
    return base + page * values.rows.batch_stride + values.pages.size.remainder(key) * values.rows.row_stride;
  }
  __device__ __forceinline__ float at(std::int64_t element) const {
    if (values.type == DType::f32) return static_cast<const float*>(values.rows.data)[element];
    return number(static_cast<const std::uint16_t*>(values.rows.data)[element]);
  }
  // Of the 16 low bits.
  __device__ __forceinline__ float number(std::uint32_t bits) const {
    if (values.type == DType::bf16) return __uint_as_float(bits << 16);
    float low, high;
    ptx::unpack_f16x2(bits, low, high);
    return low;
  }
};

}  // namespace dspattn::cuda::blocks
