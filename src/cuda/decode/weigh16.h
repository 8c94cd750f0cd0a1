// From a tile's scores to the sparse product's operands in registers, for a warp's 16 rows of which each keeps keys of
// its own (16-bit inputs): scale, mask, round, select, exponentiate (g = lane / 4, t = lane % 4).
//
// A lane has rows g and g + 8, side by side in words of two fp16 numbers (tile/select.h), and group t of every four.
// Two accumulators of the score product have those four groups' 16 keys: which of them the columns of either are is a
// matter of the rows that ldmatrix is given (row_of_column), here such that eight rows lie in different banks.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decode/team.h"
#include "cuda/tile/select.h"

namespace dspattn::cuda::decode {

// Keys [begin, begin + width) that each of a lane's rows sees by diagonal, window and length.
struct Bounds {
  int begin[2];
  unsigned width[2];
};

// Hides what of a group's four elements lies outside of these, or in no page; `first`: key of the first, in block
// `block`; `page`: Weigher::look_up()'s. Called, as what follows, so that the loop over tiles is short without it.
[[gnu::noinline]] inline __device__ uint4 hide_outside(const Params& p, uint4 words, int first, int block, int page,
                                                       Bounds seen) {
  constexpr std::uint32_t kHidden = 0xFC00FC00u;  // -inf, twice
  std::uint32_t x[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int key = first + p.keys.key(0, 0, e);
    const bool there = p.pages.table == nullptr || __shfl_sync(~0u, page, (key - block) >> 4) >= 0;
    const bool low = there && static_cast<unsigned>(key - seen.begin[0]) < seen.width[0];
    const bool high = there && static_cast<unsigned>(key - seen.begin[1]) < seen.width[1];
    x[e] = ptx::bit_select((low ? 0xFFFFu : 0u) | (high ? 0xFFFF0000u : 0u), x[e], kHidden);
  }
  return make_uint4(x[0], x[1], x[2], x[3]);
}

// The weights of a group's two keys that are not kept, of both of a lane's rows, relative to their references.
[[gnu::noinline]] inline __device__ float2 weights_left_out(const Params& p, uint4 x, float reference0,
                                                            float reference1) {
  const tile::LeftOut left =
      p.pairs != 0 ? tile::left_out_of_two(x.x, x.y, x.z, x.w) : tile::left_out_of_four(x.x, x.y, x.z, x.w);
  float first[2], second[2];
  ptx::unpack_f16x2(left.first, first[0], first[1]);
  ptx::unpack_f16x2(left.second, second[0], second[1]);
  const auto weights = [&](int i, float reference) {
    const float from = reference == -INFINITY ? 0.0f : reference;
    return ptx::exp2_fast((first[i] - from) * p.scales.exponent) +
           ptx::exp2_fast((second[i] - from) * p.scales.exponent);
  };
  return make_float2(weights(0, reference0), weights(1, reference1));
}

template <typename C>
struct RegisterRows {
  static constexpr int kQuads = C::kTileK / 16;          // of groups
  static constexpr int kSlices = C::kTileK / 32;         // of the sparse product
  static constexpr std::uint32_t kHidden = 0xFC00FC00u;  // -inf, twice
  using Element = typename Products16<C>::Element;

  // Of a tile: A of the sparse product, and what earlier results are multiplied by.
  struct Operands {
    std::uint32_t weights[kSlices][4];
    std::uint32_t metadata[kSlices];
    float shrink[2];
  };

  Team<C>& team;
  const int g, t;
  const int begin, end;  // keys that all rows see by diagonal, window and length
  float reference[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};   // of this lane's weights
  float rest[2] = {};  // of those the pruned keys'

  __device__ __forceinline__ explicit RegisterRows(Team<C>& own_team)
      : team(own_team),
        g(own_team.lane >> 2),
        t(own_team.lane & 3),
        begin(own_team.part.band.begin(own_team.part.last_query)),
        end(own_team.part.band.end(own_team.part.first_query)) {}

  // Products of all keys of a tile; then it may be overwritten.
  __device__ __forceinline__ void score(std::uint32_t k, float (&scores)[2 * kQuads][4]) const {
    const int matrix = team.lane >> 3, in_matrix = team.lane & 7;
    const int k_row = tile::row_of_column(matrix >> 1, in_matrix);
#pragma unroll
    for (auto& of_columns : scores) {
      for (float& x : of_columns) x = 0;
    }
#pragma unroll Products16 < C> ::kSteps
    for (int step = 0; step < C::kHeadDim / 16; ++step) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4(a, Products16<C>::at(team.q, team.p.teams.warps * kWarpRows,
                                            team.first_row + (matrix & 1) * 8 + in_matrix, 2 * step + (matrix >> 1)));
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4(b, Products16<C>::at(k, C::kTileK, 16 * quad + k_row, 2 * step + (matrix & 1)));
        ptx::mma_32_bytes<Element>(scores[2 * quad], a, b[0], b[1]);
        ptx::mma_32_bytes<Element>(scores[2 * quad + 1], a, b[2], b[3]);
      }
    }
    team.sync();  // K is read, by all warps
  }

  // Compared scores of a group's four elements where every row sees all keys.
  __device__ __forceinline__ void pack(const float (&low)[4], const float (&high)[4], std::uint32_t (&words)[4]) const {
    const float unit = team.p.scales.unit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t x = ptx::pack_f16x2_clamped(low[i] * unit, low[2 + i] * unit);
      const std::uint32_t y = ptx::pack_f16x2_clamped(high[i] * unit, high[2 + i] * unit);
      words[i] = t < 2 ? x : y;
      words[2 + i] = t < 2 ? y : x;
    }
  }
  __device__ __forceinline__ Bounds bounds() const {
    Bounds found;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = team.part.packed_row(team.p, team.first_row + g + 8 * i).query;
      found.begin[i] = team.part.band.begin(query);
      found.width[i] = static_cast<unsigned>(max(team.part.band.end(query) - found.begin[i], 0));
    }
    return found;
  }
  // The same where mask tensors matter; `first`: key of the group's first element.
  __device__ __forceinline__ void mask(const float (&low)[4], const float (&high)[4], int first,
                                       std::uint32_t (&words)[4]) const {
    const Params& p = team.p;
    float4 seen[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool plain = t < 2;  // see tile::row_of_column()
      const float4 raw = make_float4(plain ? low[2 * i] : high[2 * i], plain ? low[2 * i + 1] : high[2 * i + 1],
                                     plain ? high[2 * i] : low[2 * i], plain ? high[2 * i + 1] : low[2 * i + 1]);
      const tile::PackedRow row = team.part.packed_row(p, team.first_row + g + 8 * i);
      const int batch = team.part.batch, head = team.part.kv_head * p.heads_per_kv_head + row.head;
      seen[i] = mask_group<C>(p, raw, first, team.part.band.begin(row.query), team.part.band.end(row.query), batch,
                              MaskRow(p.allowed, 1, batch, head, row.query),
                              MaskRow(p.bias, p.bias_bytes, batch, head, row.query));
    }
    words[0] = ptx::pack_f16x2(seen[0].x, seen[1].x);
    words[1] = ptx::pack_f16x2(seen[0].y, seen[1].y);
    words[2] = ptx::pack_f16x2(seen[0].z, seen[1].z);
    words[3] = ptx::pack_f16x2(seen[0].w, seen[1].w);
  }

  // Raises the references to the largest of the kept scores of both rows.
  __device__ __forceinline__ void raise(std::uint32_t largest, float (&shrink)[2]) {
    largest = ptx::max_f16x2(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = ptx::max_f16x2(largest, __shfl_xor_sync(~0u, largest, 2));
    float of_row[2];
    ptx::unpack_f16x2(largest, of_row[0], of_row[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float raised = fmaxf(reference[i], of_row[i]);
      shrink[i] = raised == reference[i] ? 1.0f : ptx::exp2_fast((reference[i] - raised) * team.p.scales.exponent);
      reference[i] = raised;
      sum[i] *= shrink[i];
      rest[i] *= shrink[i];
    }
  }

  // Of row g + 8 i in a word, relative to the reference. Of a row that has seen no key all scores are -inf.
  __device__ __forceinline__ float weight(std::uint32_t word, int i) const {
    float scores[2];
    ptx::unpack_f16x2(word, scores[0], scores[1]);
    const float from = reference[i] == -INFINITY ? 0.0f : reference[i];
    return ptx::exp2_fast((scores[i] - from) * team.p.scales.exponent);
  }

  // Calls visit(i) for both of a lane's rows, but where the warp has eight at most for the first alone.
  template <int kMostRows = kWarpRows, typename Visit>
  __device__ __forceinline__ void each_row(Visit visit) const {
    visit(0);
    if constexpr (kMostRows > 8) {
      if (team.rows > 8) visit(1);
    }
  }

  // Compared scores of tile `index`: words of this lane's group of every quad.
  __device__ __forceinline__ void compare(const float (&scores)[2 * kQuads][4], int index,
                                          std::uint32_t (&words)[kQuads][4]) const {
    const int block = block_of<C>(index), part = part_of<C>(index);
    const auto first = [&](int quad) { return block + team.p.keys.key(part, 4 * quad + t, 0); };
    if (!team.weigher.plain) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        mask(scores[2 * quad], scores[2 * quad + 1], first(quad), words[quad]);
      }
      return;
    }
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) pack(scores[2 * quad], scores[2 * quad + 1], words[quad]);
    if (team.weigher.pages_are_there() && begin <= block && block + tile::kBlockKeys <= end) return;
    const Bounds seen = bounds();
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      auto& x = words[quad];
      const uint4 hidden =
          hide_outside(team.p, make_uint4(x[0], x[1], x[2], x[3]), first(quad), block, team.weigher.page, seen);
      x[0] = hidden.x;
      x[1] = hidden.y;
      x[2] = hidden.z;
      x[3] = hidden.w;
    }
  }

  // Weighs tile `index`, for the sparse product, whose metadata tells what was kept.
  __device__ __forceinline__ Operands weigh(const float (&scores)[2 * kQuads][4], int index) {
    tile::Kept kept[kQuads];
    Operands result = weigh_kept<kWarpRows>(scores, index, kept);
    write_metadata(codes_of(kept), result);
    return result;
  }
  // The same where the warp has one row, whose codes tell what is to be gathered (tile/few_rows.h).
  __device__ __forceinline__ Operands weigh(const float (&scores)[2 * kQuads][4], int index, std::uint8_t* codes) {
    tile::Kept kept[kQuads];
    const Operands result = weigh_kept<1>(scores, index, kept);
    const std::uint32_t nibbles = codes_of(kept);
    const auto hidden = [](std::uint32_t word) { return (word & 0xFFFFu) == (kHidden & 0xFFFFu); };
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const std::uint32_t code = (nibbles >> (4 * quad) & 15u) | (hidden(kept[quad].first) ? 16u : 0u) |
                                 (hidden(kept[quad].second) ? 32u : 0u);
      if (g == 0) codes[4 * quad + t] = static_cast<std::uint8_t>(code);
    }
    return result;
  }
  // All but telling what was kept.
  template <int kMostRows>
  __device__ __forceinline__ Operands weigh_kept(const float (&scores)[2 * kQuads][4], int index,
                                                 tile::Kept (&kept)[kQuads]) {
    std::uint32_t words[kQuads][4];
    compare(scores, index, words);
    std::uint32_t largest = kHidden;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const auto& x = words[quad];
      kept[quad] = team.p.pairs != 0 ? tile::keep_one_of_two(x[0], x[1], x[2], x[3])
                                     : tile::keep_two_of_four(x[0], x[1], x[2], x[3]);
      largest = ptx::max_f16x2(largest, ptx::max_f16x2(kept[quad].first, kept[quad].second));
    }
    Operands result = {};
    raise(largest, result.shrink);
    each_row<kMostRows>([&](int i) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float first = weight(kept[quad].first, i), second = weight(kept[quad].second, i);
        sum[i] += first + second;
        result.weights[quad / 2][2 * (quad % 2) + i] =
            C::kType == DType::bf16 ? ptx::pack_bf16x2(first, second) : ptx::pack_f16x2(first, second);
      }
    });
    if (team.p.keeps_rest()) add_pruned(words);
    return result;
  }

  // The weights of the keys that are not kept, where they count.
  __device__ __forceinline__ void add_pruned(const std::uint32_t (&words)[kQuads][4]) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const auto& x = words[quad];
      const float2 pruned = weights_left_out(team.p, make_uint4(x[0], x[1], x[2], x[3]), reference[0], reference[1]);
      sum[0] += pruned.x;
      rest[0] += pruned.x;
      sum[1] += pruned.y;
      rest[1] += pruned.y;
    }
  }

  // Leaves the compared scores of tile `index` at to[row][key], and adds up the weights of all that are seen.
  __device__ __forceinline__ void store(const float (&scores)[2 * kQuads][4], int index, std::uint16_t* to) {
    std::uint32_t words[kQuads][4];
    compare(scores, index, words);
    std::uint32_t largest = kHidden;
#pragma unroll
    for (const auto& x : words) {
      largest = ptx::max_f16x2(largest, ptx::max_f16x2(ptx::max_f16x2(x[0], x[1]), ptx::max_f16x2(x[2], x[3])));
    }
    float shrink[2];
    raise(largest, shrink);
    each_row([&](int i) {
      const bool has_row = g + 8 * i < team.rows;
      const std::uint32_t half = i == 0 ? 0x5410u : 0x7632u;  // of two words, side by side
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const auto& x = words[quad];
        sum[i] += (weight(x[0], i) + weight(x[1], i)) + (weight(x[2], i) + weight(x[3], i));
        auto* group = reinterpret_cast<uint2*>(to + (g + 8 * i) * C::kTileK) + 4 * quad + t;
        if (has_row) *group = {ptx::permute_bytes(x[0], x[1], half), ptx::permute_bytes(x[2], x[3], half)};
      }
    });
  }

  // Which two elements are kept, a nibble for each of this lane's groups, of row g + 8 in the high half.
  __device__ __forceinline__ static std::uint32_t codes_of(const tile::Kept (&kept)[kQuads]) {
    const tile::KeptPair first = tile::pair_kept<0>(kept[0], kept[1]);
    tile::KeptPair second{};
    if constexpr (kQuads == 4) second = tile::pair_kept<2>(kept[2], kept[3]);
    return tile::metadata_two_of_four(first, second);
  }

  // Of a slice's groups lane 0 of a quad of lanes wants those of 0 ... 3, lane 1 the others, a nibble each. This lane
  // has groups t and t + 4.
  __device__ __forceinline__ void write_metadata(std::uint32_t nibbles, Operands& result) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const std::uint32_t lower = (nibbles >> (8 * slice) & 0x000F000Fu) << (4 * t);
      const std::uint32_t upper = (nibbles >> (8 * slice + 4) & 0x000F000Fu) << (4 * t);
      std::uint32_t all = (t & 1) == 0 ? lower : upper;
      all |= __shfl_xor_sync(~0u, (t & 1) == 0 ? upper : lower, 1);
      result.metadata[slice] = all | __shfl_xor_sync(~0u, all, 2);
    }
  }

  // Shrinks what is added up so far and adds weights times V.
  __device__ __forceinline__ void shrink(const float (&by)[2]) {
    if (__all_sync(~0u, by[0] == 1.0f && by[1] == 1.0f)) return;
#pragma unroll
    for (auto& o : team.products.out) {
      o[0] *= by[0];
      o[1] *= by[0];
      o[2] *= by[1];
      o[3] *= by[1];
    }
  }
  __device__ __forceinline__ void accumulate(const Operands& operands, std::uint32_t v) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int chunk = 0; chunk < C::kHeadDim / 8; ++chunk) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, Products16<C>::at(v, C::kTileK, 32 * slice + team.lane, chunk));
        ptx::mma_sparse_64_bytes<Element, 0>(team.products.out[chunk], operands.weights[slice], b,
                                             operands.metadata[slice]);
      }
    }
  }

  // The same where the tile has the kept rows alone.
  __device__ __forceinline__ void accumulate_gathered(const Operands& operands, std::uint32_t v) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int chunk = 0; chunk < C::kHeadDim / 8; chunk += 2) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(
            b, Products16<C>::at(v, C::kTileK / 2, 16 * slice + (team.lane & 15), chunk + (team.lane >> 4)));
        ptx::mma_32_bytes<Element>(team.products.out[chunk], operands.weights[slice], b[0], b[1]);
        ptx::mma_32_bytes<Element>(team.products.out[chunk + 1], operands.weights[slice], b[2], b[3]);
      }
    }
  }

  // Leaves the rows' stats where the CTA joins them: those of the warp.
  __device__ __forceinline__ void deposit_stats(RowStats* stats) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = sum[i], pruned = rest[i];
      for (const int offset : {1, 2}) {
        total += __shfl_xor_sync(~0u, total, offset);
        pruned += __shfl_xor_sync(~0u, pruned, offset);
      }
      if (t == 0) stats[g + 8 * i] = {reference[i], total, pruned};
    }
  }
};

}  // namespace dspattn::cuda::decode
