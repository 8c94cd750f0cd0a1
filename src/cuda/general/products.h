// A warp's two products on mma.sync: the registers that hold operands and results, and how they are issued.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/blocks/references.h"
#include "cuda/general/config.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/near_tf32.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/single.h"
#include "cuda/ptx/sm80.h"
#include "cuda/tile/key_map.h"

namespace dspattn::cuda::general {

template <DType kType>
using ElementOf =
    std::conditional_t<kType == DType::f32, float, std::conditional_t<kType == DType::bf16, __nv_bfloat16, __half>>;

// 16 query rows of a warp; a lane has rows g and g + 8 (g = lane / 4).
template <typename C>
struct RowBlock {
  float scores[C::kPartColumns / 2];
  std::uint32_t weights[C::kWeights], metadata[C::kMetadata];
  float out[C::kOutColumns / 2];
  blocks::RowState state;
  float shrink0, shrink1;  // kSharesOutput: by which the last tile shrinks the output
};

template <typename C>
struct Products {
  using Element = ElementOf<C::kType>;

  std::uint32_t q_tile;        // address of Q in shared memory
  std::uint32_t own_q, own_k;  // kKeepsAddresses: what q_row() and k_row() say
  std::uint32_t q[C::kRowBlocks][4];
  RowBlock<C> rows[C::kOutBlocks];  // the warp's own, then its neighbour's

  __device__ __forceinline__ explicit Products(std::uint32_t q_address) : q_tile(q_address) {
    if constexpr (C::kKeepsAddresses) {
      own_q = ptx::held(q_row());
      own_k = ptx::held(k_row());
    }
  }

  // Before an item.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (RowBlock<C>& block : rows) {
#pragma unroll
      for (float& x : block.out) x = 0;
      block.state = blocks::empty_rows();
    }
  }

  // Where a lane reads is computed where it is needed, not kept: registers are short.
  __device__ __forceinline__ static int thread() { return ptx::opaque(static_cast<int>(threadIdx.x)); }
  __device__ __forceinline__ static int lane() { return thread() & 31; }
  // Q of the warp's rows.
  __device__ __forceinline__ std::uint32_t warp_q() const {
    return q_tile + static_cast<std::uint32_t>((thread() >> 5) * C::kWarpQBytes);
  }
  // For ldmatrix at step 0. Q: lane l addresses row l % 16 and of 32 bytes the first or the second half.
  __device__ __forceinline__ std::uint32_t q_row() const {
    return warp_q() + static_cast<std::uint32_t>(tile::swizzled_offset(lane() & 15, lane() >> 4));
  }
  // K: rows of two blocks of eight keys.
  __device__ __forceinline__ static std::uint32_t k_row() {
    return static_cast<std::uint32_t>(tile::swizzled_offset((lane() >> 4) * 8 + (lane() & 7), lane() >> 3 & 1));
  }
  // Of the output.
  __device__ __forceinline__ static int first_column() {
    return C::kSharesOutput ? (thread() >> 5 & 1) * C::kOutColumns : 0;
  }
  // V: of `fours` the 32 keys of a step, else 16 keys and two chunks; of fp32 the lane's own key t and column g.
  __device__ __forceinline__ static std::uint32_t v_row() {
    if constexpr (C::kIsFp32) {
      return static_cast<std::uint32_t>((lane() & 3) * C::kVRowBytes + 4 * (lane() >> 2) + 4 * first_column());
    }
    if constexpr (C::kKind == Kind::fours) return static_cast<std::uint32_t>(tile::swizzled_offset(lane(), 0));
    return static_cast<std::uint32_t>(tile::swizzled_offset(lane() & 15, lane() >> 4));
  }

  __device__ __forceinline__ static void load_q_step(std::uint32_t row, int block, int step, std::uint32_t (&to)[4]) {
    ptx::ldmatrix_x4(to, (row ^ static_cast<std::uint32_t>(step % 4 * 32)) +
                             static_cast<std::uint32_t>(step / 4 * C::kPanelQBytes + block * 16 * 128));
  }
  // The scores of the K tile at `k`, or of a part of its columns.
  __device__ __forceinline__ void compute_scores(std::uint32_t k, int part = 0) {
    if constexpr (C::kKind == Kind::precise) return compute_precise(k);
    const std::uint32_t q_at = C::kKeepsAddresses ? own_q : q_row();
    const std::uint32_t k_at =
        k + (C::kKeepsAddresses ? own_k : k_row()) + static_cast<std::uint32_t>(part * C::kPartColumns * 128);
    // fp32 at d = 512 panel by panel: unrolled, too many loads would be asked for at once.
    constexpr int kSteps = C::kScoreSteps > 32 ? 4 : C::kScoreSteps;
    if constexpr (kSteps < C::kScoreSteps) clear_scores();
#pragma unroll 1
    for (int first_step = 0; first_step < C::kScoreSteps; first_step += kSteps) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) add_score_step(q_at, k_at, first_step + i);
    }
  }

  // kSharesOutput: gives the neighbour the weights of a tile, and takes its own. `place`: of what a warp gives, one
  // after the other; free, and until the next barrier of the CTA.
  __device__ __forceinline__ void exchange_weights(std::uint32_t place) {
    RowBlock<C>& own = rows[0];
    RowBlock<C>& other = rows[1];
    const std::uint32_t to = given(place, 0);
#pragma unroll
    for (int i = 0; i < C::kWeights; i += 4) {
      ptx::store_shared_16(to + 128 * i, own.weights[i], own.weights[i + 1], own.weights[i + 2], own.weights[i + 3]);
    }
    ptx::store_shared_16(to + 128 * C::kWeights, __float_as_uint(own.shrink0), __float_as_uint(own.shrink1),
                         C::kKind == Kind::pairs ? own.metadata[0] : 0u, 0u);
    await_neighbour();
    const std::uint32_t from = given(place, 1);
#pragma unroll
    for (int i = 0; i < C::kWeights; i += 4) {
      const float4 words = ptx::load_shared_16(from + 128 * i);
      other.weights[i] = __float_as_uint(words.x);
      other.weights[i + 1] = __float_as_uint(words.y);
      other.weights[i + 2] = __float_as_uint(words.z);
      other.weights[i + 3] = __float_as_uint(words.w);
    }
    const float4 words = ptx::load_shared_16(from + 128 * C::kWeights);
    other.shrink0 = words.x;
    other.shrink1 = words.y;
    other.metadata[0] = __float_as_uint(words.z);
    static_assert(!C::kSharesOutput || C::kMetadata == 1);
#pragma unroll
    for (RowBlock<C>& block : rows) {
      if (__all_sync(~0u, block.shrink0 == 1 && block.shrink1 == 1) != 0) continue;
      blocks::RowState unused{};
      blocks::shrink({block.shrink0, block.shrink1, false, false}, unused, block.out);
    }
  }
  // The same of what is known of rows at the end.
  __device__ __forceinline__ void exchange_states(std::uint32_t place) {
    const blocks::RowState& own = rows[0].state;
    ptx::store_shared_16(given(place, 0), __float_as_uint(own.sum0), __float_as_uint(own.sum1),
                         __float_as_uint(own.minus0), __float_as_uint(own.minus1));
    await_neighbour();
    const float4 words = ptx::load_shared_16(given(place, 1));
    rows[1].state = {words.x, words.y, words.z, words.w, 0};
  }

  // The V tile at `v` times the weights, added to the output.
  __device__ __forceinline__ void add_output(std::uint32_t tile) {
    const std::uint32_t v = tile + (C::kKind == Kind::precise ? 0 : v_row());
    if constexpr (C::kKind == Kind::fours) {
      add_fours(v);
    } else if constexpr (C::kKind == Kind::pairs) {
      add_pairs(v);
    } else if constexpr (C::kKind == Kind::precise) {
      add_precise(v);
    } else if constexpr (C::kIsFp32) {
      add_tf32(v);
    } else {
      add_dense(v);
    }
  }

 private:
  // Where this lane finds what its warp (0) or the neighbour (1) gives.
  __device__ __forceinline__ static std::uint32_t given(std::uint32_t place, int neighbour) {
    return place + static_cast<std::uint32_t>((thread() >> 5 ^ neighbour) * C::kGivenBytes + 16 * lane());
  }
  __device__ __forceinline__ static void await_neighbour() { ptx::named_barrier_sync(1 + (thread() >> 6), 64); }

  // A word of K or V as the tensor core takes it, where it is not so yet.
  __device__ __forceinline__ static std::uint32_t rounded(std::uint32_t word) {
    return C::kRoundsFragments ? ptx::near_tf32(__uint_as_float(word)) : word;
  }
  __device__ __forceinline__ void clear_scores() {
#pragma unroll
    for (int i = 0; i < C::kRowBlocks; ++i) {
#pragma unroll
      for (float& score : rows[i].scores) score = 0;
    }
  }

  // 32 bytes of columns.
  __device__ __forceinline__ void add_score_step(std::uint32_t q_at, std::uint32_t k_at, int step) {
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) load_q_step(q_at, block, step, q[block]);
#pragma unroll
    for (int pair = 0; pair < C::kPartColumns / 16; ++pair) {
      std::uint32_t b[4];
      ptx::ldmatrix_x4(b, (k_at ^ static_cast<std::uint32_t>(step % 4 * 32)) +
                              static_cast<std::uint32_t>(step / 4 * C::kPanelKBytes + pair * 16 * 128));
#pragma unroll
      for (std::uint32_t& word : b) word = rounded(word);
#pragma unroll
      for (int block = 0; block < C::kRowBlocks; ++block) {
        add_scores(block, 2 * pair, step, q[block], b[0], b[1]);
        add_scores(block, 2 * pair + 1, step, q[block], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ static float (&four(float* registers))[4] {
    return *reinterpret_cast<float(*)[4]>(registers);
  }
  __device__ __forceinline__ static const std::uint32_t (&four(const std::uint32_t* registers))[4] {
    return *reinterpret_cast<const std::uint32_t(*)[4]>(registers);
  }
  __device__ __forceinline__ void add_scores(int block, int columns, int step, const std::uint32_t (&a)[4],
                                             std::uint32_t b0, std::uint32_t b1) {
    float(&to)[4] = four(rows[block].scores + 4 * columns);
    if (step == 0 && C::kScoreSteps <= 32) {
      ptx::mma_32_bytes_from_zero<Element>(to, a, b0, b1);
    } else {
      ptx::mma_32_bytes<Element>(to, a, b0, b1);
    }
  }

  __device__ __forceinline__ static void add_sparse(RowBlock<C>& block, int columns, int step,
                                                    const std::uint32_t (&b)[4]) {
    float(&to)[4] = four(block.out + 4 * columns);
    const std::uint32_t(&a)[4] = four(block.weights + 4 * step);
    if (step % 2 == 0) {
      ptx::mma_sparse_64_bytes<Element, 0>(to, a, b, block.metadata[step / 2]);
    } else {
      ptx::mma_sparse_64_bytes<Element, 1>(to, a, b, block.metadata[step / 2]);
    }
  }

  // 32 keys a step, of which two of each four have weights.
  __device__ __forceinline__ void add_fours(std::uint32_t v) {
#pragma unroll
    for (int step = 0; step < C::kTileK / 32; ++step) {
#pragma unroll
      for (int columns = 0; columns < C::kOutColumns / 8; ++columns) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, (v ^ static_cast<std::uint32_t>(columns % 8 * 16)) +
                                      static_cast<std::uint32_t>(columns / 8 * C::kPanelKBytes + step * 32 * 128));
#pragma unroll
        for (RowBlock<C>& block : rows) {
          add_sparse(block, columns, step, b);
        }
      }
    }
  }
  // 16 keys a step.
  __device__ __forceinline__ void add_dense(std::uint32_t v) {
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
#pragma unroll
      for (int columns = 0; columns < C::kOutColumns / 8; columns += 2) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, (v ^ static_cast<std::uint32_t>(columns % 8 * 16)) +
                                      static_cast<std::uint32_t>(columns / 8 * C::kPanelKBytes + step * 16 * 128));
#pragma unroll
        for (RowBlock<C>& block : rows) {
          ptx::mma_32_bytes<Element>(four(block.out + 4 * columns), four(block.weights + 4 * step), b[0], b[1]);
          ptx::mma_32_bytes<Element>(four(block.out + 4 * columns + 4), four(block.weights + 4 * step), b[2], b[3]);
        }
      }
    }
  }
  // 16 keys a step, one weight of each two.
  __device__ __forceinline__ void add_pairs(std::uint32_t v) {
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
#pragma unroll
      for (int columns = 0; columns < C::kOutColumns / 8; ++columns) {
        std::uint32_t b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = load_v(v, 16 * step + 4 * i, columns);
#pragma unroll
        for (RowBlock<C>& block : rows) {
          add_sparse(block, columns, step, b);
        }
      }
    }
  }
  // 8 keys a step.
  __device__ __forceinline__ void add_tf32(std::uint32_t v) {
#pragma unroll
    for (int step = 0; step < C::kTileK / 8; ++step) {
#pragma unroll
      for (int columns = 0; columns < C::kOutColumns / 8; ++columns) {
        const std::uint32_t b0 = load_v(v, 8 * step, columns), b1 = load_v(v, 8 * step + 4, columns);
#pragma unroll
        for (RowBlock<C>& block : rows) {
          ptx::mma_32_bytes<Element>(four(block.out + 4 * columns), four(block.weights + 4 * step), b0, b1);
        }
      }
    }
  }
  // In full fp32: a lane computes what an mma would leave with it.
  __device__ __forceinline__ void compute_precise(std::uint32_t k) {
    clear_scores();
    const auto g = static_cast<std::uint32_t>(lane()) >> 2;
    const auto t = static_cast<std::uint32_t>(lane()) & 3;
    const std::uint32_t own_q = warp_q() + g * 128;
    const std::uint32_t own_k = k + 2 * t * 128;
#pragma unroll 1
    for (std::uint32_t chunk = 0; chunk < C::kRowBytes / 16; ++chunk) {
      const std::uint32_t panel = chunk / 8;
      float4 a[C::kRowBlocks][2];
#pragma unroll
      for (int i = 0; i < 2 * C::kRowBlocks; ++i) {
        a[i / 2][i % 2] = ptx::load_shared_16(own_q + panel * C::kPanelQBytes + i * 8 * 128 + ((chunk ^ g) % 8 << 4));
      }
#pragma unroll
      for (int column = 0; column < C::kTileK / 4; ++column) {  // of the lane's: 8 (column / 2) + 2t + column % 2
        const std::uint32_t i = column % 2;
        const float4 b = ptx::load_shared_16(own_k + panel * C::kPanelKBytes + (column / 2 * 8 + i) * 128 +
                                             ((chunk ^ (2 * t + i)) % 8 << 4));
#pragma unroll
        for (int block = 0; block < C::kRowBlocks; ++block) {
          float* score = rows[block].scores + 4 * (column / 2) + column % 2;
          score[0] = dot(a[block][0], b, score[0]);
          score[2] = dot(a[block][1], b, score[2]);
        }
      }
    }
  }
  __device__ __forceinline__ static float dot(const float4& a, const float4& b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
  }
  __device__ __forceinline__ void add_precise(std::uint32_t v) {
    const int quad = lane() & 28;
    const std::uint32_t columns_2t = static_cast<std::uint32_t>(8 * (lane() & 3));
#pragma unroll
    for (int column = 0; column < C::kTileK / 4; ++column) {
#pragma unroll 1
      for (int source = 0; source < 4; ++source) {
        float weight[C::kRowBlocks][2];
#pragma unroll
        for (int i = 0; i < 2 * C::kRowBlocks; ++i) {
          const std::uint32_t own = rows[i / 2].weights[4 * (column / 2) + column % 2 + 2 * (i % 2)];
          weight[i / 2][i % 2] = __uint_as_float(__shfl_sync(~0u, own, quad + source));
        }
        const std::uint32_t row =
            v + columns_2t + static_cast<std::uint32_t>((column / 2 * 8 + 2 * source + column % 2) * C::kVRowBytes);
#pragma unroll
        for (int columns = 0; columns < C::kOutColumns / 8; ++columns) {
          std::uint32_t bits[2];
          ptx::load_shared_bytes<8>(row + static_cast<std::uint32_t>(columns * 32), bits);
#pragma unroll
          for (int block = 0; block < C::kRowBlocks; ++block) {
            float* out = rows[block].out + 4 * columns;
            out[0] = fmaf(weight[block][0], __uint_as_float(bits[0]), out[0]);
            out[1] = fmaf(weight[block][0], __uint_as_float(bits[1]), out[1]);
            out[2] = fmaf(weight[block][1], __uint_as_float(bits[0]), out[2]);
            out[3] = fmaf(weight[block][1], __uint_as_float(bits[1]), out[3]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ static std::uint32_t load_v(std::uint32_t v, int row, int columns) {
    return rounded(ptx::load_shared(v + static_cast<std::uint32_t>(row * C::kVRowBytes + columns * 32)));
  }
};

}  // namespace dspattn::cuda::general
