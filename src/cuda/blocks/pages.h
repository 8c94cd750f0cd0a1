// Keys and values in pages, as kernels see them.
#pragma once

#include <cstdint>

#include "cuda/tile/divisor.h"
#include "dspattn/pattern.h"

namespace dspattn::cuda::blocks {

// Keys and values in pages: key j of sequence b is row j % size of page table[b, j / size].
struct Pages {
  const std::int32_t* table = nullptr;  // null: K and V are in one piece
  std::int64_t sequence_stride = 0, block_stride = 0;
  tile::Divisor size;
  int count = 0;  // pages there are; other numbers are no page

  // Negative: the key is in no page, and is hidden.
  DSPATTN_HOST_DEVICE int page_of(int sequence, int key) const {
    const int page = table[sequence * sequence_stride + size.quotient(key) * block_stride];
    return page >= 0 && page < count ? page : -1;
  }
};

}  // namespace dspattn::cuda::blocks
