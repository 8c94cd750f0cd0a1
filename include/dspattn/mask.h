// Which keys a query may see. One type; its parts compose by intersection: a key is visible when every part given
// allows it. Masked keys never take a slot from visible ones.
#pragma once

#include <cstdint>
#include <optional>

#include "dspattn/tensor_view.h"

namespace dspattn {

// Where the diagonal of causal masks and windows lies when n_q != n_k. Query i sits at key position
//   bottom_right: i + offset + (n_k - n_q)     the last query sees the last key (decoding with a cache)
//   top_left:     i + offset                   as PyTorch's scaled_dot_product_attention
// n_q and n_k are those of the query's own sequence; key_lengths do not move the diagonal.
enum class Alignment : std::uint8_t { bottom_right, top_left };

struct Mask {
  bool causal = false;  // key j visible to a query at position p only if j <= p
  Alignment alignment = Alignment::bottom_right;
  // Moves the diagonal: of pieces cut out of longer sequences, aligned top_left, where query 0 stands among the keys
  // given. Negative when it stands before key 0. At most 2^39 either way.
  std::int64_t offset = 0;
  std::optional<std::int64_t> window_left;   // key j visible only if j >= p - window_left
  std::optional<std::int64_t> window_right;  // key j visible only if j <= p + window_right

  ConstTensorView key_lengths;  // int32 [batch]: keys at and past the length are masked
  ConstTensorView allowed;      // bool [batch|1, heads|1, n_q|1, n_k|1], zero = masked
  ConstTensorView bias;         // fp32 or q's type, [batch|1, heads|1, n_q|1, n_k|1], added to the scaled scores;
                                // -inf masks
};

}  // namespace dspattn
