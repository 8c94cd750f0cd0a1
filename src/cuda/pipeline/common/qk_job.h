// How qk_prune's work is split, and the copies of K and Q.
#pragma once

#include <cstdint>

#include "cuda/pipeline/common/copy.h"
#include "cuda/pipeline/common/params.h"
#include "cuda/pipeline/common/visibility.h"
#include "cuda/ptx/sm80.h"

namespace dspattn::cuda::pipeline {

// What decides which keys a row sees: nothing but where the matrix ends; or key lengths, causal masks and windows; or
// also booleans and biases, looked up one by one.
enum class QkMasks { none, band, elements };

// What a CTA works on: tiles of kTile places, kOwn neighbours for every kTileThreads threads, and rows. Everything
// follows from the CTA's number, so that rare paths compute it again instead of keeping registers.
template <int kTile, int kTileThreads, int kOwn = 1>
struct QkJob {
  int matrix, row_tile;
  int first_tile, end_tile;  // end_tile is where the stored matrix ends, if that is earlier

  static constexpr int kPlaces = kTile;

  __device__ __forceinline__ QkJob(const QkPruneParams& p, unsigned cta) {
    const int tiles = static_cast<int>(blockDim.x) / kTileThreads * kOwn;
    const unsigned rest = cta / static_cast<unsigned>(p.key_groups);
    matrix = static_cast<int>(rest / static_cast<unsigned>(p.row_tiles));
    row_tile = static_cast<int>(rest) - matrix * p.row_tiles;
    first_tile = (static_cast<int>(cta) - static_cast<int>(rest) * p.key_groups) * tiles;
    end_tile = min(first_tile + tiles, static_cast<int>((p.scores.places + kTile - 1) / kTile));
    if (p.walk.columns != nullptr) {
      end_tile = min(end_tile, p.walk.counts[row_block(p)] << p.walk.tiles_log2<kTile>());
    }
  }

  __device__ __forceinline__ int batch(const QkPruneParams& p) const { return matrix / p.heads; }
  __device__ __forceinline__ int head(const QkPruneParams& p) const { return matrix % p.heads; }
  __device__ __forceinline__ int key_length(const QkPruneParams& p) const {
    return static_cast<int>(p.walk.key_length(batch(p)));
  }
  __device__ __forceinline__ int row_begin(const QkPruneParams& p) const { return row_tile * p.rows_per_cta; }
  // With a block mask a CTA has one block row.
  __device__ __forceinline__ int row_block(const QkPruneParams& p) const { return row_begin(p) / p.walk.block; }
  // The i-th tile of this thread.
  __device__ __forceinline__ int own_tile(int i = 0) const {
    return first_tile + static_cast<int>(threadIdx.x) / kTileThreads * kOwn + i;
  }
  // The first key of the block that a tile lies in.
  __device__ __forceinline__ int block_key(const QkPruneParams& p, int tile) const {
    return p.walk.key_block(row_block(p), p.walk.slot_of_tile<kTile>(tile)) * p.walk.block;
  }
  // [begin, end): all keys of a tile lie within.
  __device__ __forceinline__ CommonKeys keys(const QkPruneParams& p, int tile) const {
    const int begin = block_key(p, tile) + (p.interleaved ? 0 : p.walk.place_in_block<kTile>(tile));
    return {begin, begin + (p.interleaved ? kInterleaveBlock : kTile)};
  }
};

// This CTA's job, computed again.
template <typename Job>
__device__ __forceinline__ Job same_job(const QkPruneParams& p) {
  return Job(p, static_cast<unsigned>(ptx::forget(static_cast<int>(blockIdx.x))));
}

// Rows of a job in [begin, end). Where masked blocks are skipped, those whose block row visits none of the CTA's tiles
// are left out; the visible block rows follow each other.
struct RowRange {
  int begin, end;
};

template <int kTile, int kTileThreads, int kOwn>
__device__ __forceinline__ RowRange job_rows(const QkPruneParams& p, const QkJob<kTile, kTileThreads, kOwn>& job) {
  RowRange rows{job.row_begin(p), min(job.row_begin(p) + p.rows_per_cta, static_cast<int>(p.scores.rows))};
  if (!p.walk.skip_masked) return rows;
  const int first_slot = p.walk.slot_of_tile<kTile>(job.first_tile);
  const int last_slot = p.walk.slot_of_tile<kTile>(job.end_tile - 1);
  const auto hidden = [&](int row) {
    const SlotRange slots = p.walk.slots(row / p.walk.block, job.batch(p));
    return slots.begin > last_slot || slots.end <= first_slot;
  };
  while (rows.begin < rows.end && hidden(rows.begin)) rows.begin += p.walk.block;
  while (rows.begin < rows.end && hidden(rows.end - 1)) rows.end = (rows.end - 1) / p.walk.block * p.walk.block;
  return rows;
}

// Whether the block row of `row` visits this thread's tiles, which lie in one block.
template <typename Job>
__device__ __forceinline__ bool visits_tile(const QkPruneParams& p, int row) {
  const Job job = same_job<Job>(p);
  const SlotRange slots = p.walk.slots(row / p.walk.block, job.batch(p));
  const int slot = p.walk.slot_of_tile<Job::kPlaces>(job.own_tile());
  return slot >= slots.begin && slot < slots.end;
}

// kTile places of K from place0 of the block on that starts at key block_key; offset(row, chunk) says where a chunk
// lies from `at` on. A tile whose block exists is copied by additions where keys (p.k.advance) and memory
// (Offset::step) allow it.
template <typename Element, int kChunks, int kTile, typename Offset>
__device__ __forceinline__ void load_key_tile(const QkPruneParams& p, const Element* keys, int block_key, int place0,
                                              char* at, Offset offset) {
  const int n_k = static_cast<int>(p.walk.n_k);
  const int pass = static_cast<int>(blockDim.x) / kChunks;
  const std::int64_t row_bytes = p.k.row_stride * static_cast<int>(sizeof(Element));
  const auto key_of = [&](int row) {
    const int place = place0 + place_of_column(row, static_cast<int>(sizeof(Element)));
    return block_key + key_in_block(place, p.group_log2, p.interleaved);
  };
  const int step = pass > 0 && kTile % pass == 0 ? Offset::step(pass) : 0;
  if (p.k.advance > 0 && step > 0 && block_key + p.walk.block <= n_k) {
    const int row = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
    const char* from = reinterpret_cast<const char*>(keys) + key_of(row) * row_bytes + chunk * kChunkBytes;
    std::uint32_t to = ptx::shared_address(at + offset(row, chunk));
    for (int i = 0; i < kTile; i += pass) {
      ptx::cp_async_16(to, from);
      from += p.k.advance * row_bytes;
      to += static_cast<std::uint32_t>(step);
    }
  } else {
    copy_rows<Element, kChunks>(
        at, keys, p.k, 0, kTile, 0,
        [&](int row) {
          const int key = key_of(row);
          return key < n_k ? key : -1;
        },
        offset);
  }
}

// The CTA's K tiles; offset.tile(i) says where the i-th begins in shared memory.
template <typename Element, int kChunks, typename Job, typename Offset>
__device__ __forceinline__ void load_keys(const QkPruneParams& p, const Job& job, char* shared, Offset offset) {
  const Element* keys = matrix_of<Element>(p.k, job.batch(p), job.head(p) / p.heads_per_kv);
  for (int tile = job.first_tile; tile < job.end_tile; ++tile) {
    load_key_tile<Element, kChunks, Job::kPlaces>(p, keys, job.block_key(p, tile),
                                                  p.walk.place_in_block<Job::kPlaces>(tile),
                                                  shared + offset.tile(tile - job.first_tile), offset);
  }
}

// `rows` query rows from `row` on; those past the last are zeros.
template <typename Element, int kChunks, typename Offset>
__device__ __forceinline__ void load_queries(const QkPruneParams& p, const Element* q, int row, int rows, char* shared,
                                             Offset offset) {
  const int n_q = static_cast<int>(p.walk.n_q);
  copy_rows<Element, kChunks>(
      shared, q, p.q, 0, rows, 0, [&](int i) { return row + i < n_q ? row + i : -1; }, offset);
}

// The query rows of a CTA, kRows at a time. Stages whose rows all exist are a stream where the copies allow it: 16-byte
// chunks, whole rows, four passes. Offset::step(pass) is how far apart rows `pass` apart lie in shared memory, 0 if
// that varies.
template <typename Element, int kChunks, int kRows, typename Offset>
struct QueryStages {
  static constexpr int kPasses = 4;
  const Element* q;
  RowStream<kPasses> stream;
  int streamed_end;  // rows from here on are copied one by one

  __device__ __forceinline__ QueryStages(const QkPruneParams& p, const Element* rows, int first_row)
      : q(rows), streamed_end(0) {
    const int pass = static_cast<int>(blockDim.x) / kChunks;
    const int row = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
    stream.to_step = static_cast<std::uint32_t>(Offset::step(pass));
    if (p.q.advance == 0 || pass * kPasses != kRows || stream.to_step == 0) return;
    const std::int64_t row_bytes = p.q.row_stride * static_cast<int>(sizeof(Element));
    stream.from = reinterpret_cast<const char*>(rows) + (first_row + row) * row_bytes + chunk * kChunkBytes;
    stream.pass_bytes = pass * row_bytes;
    stream.tile_bytes = kRows * row_bytes;
    stream.to = static_cast<std::uint32_t>(Offset()(row, chunk));
    streamed_end = static_cast<int>(p.walk.n_q);
  }

  // Rows in ascending order, stage by stage.
  __device__ __forceinline__ void load(const QkPruneParams& p, int row, char* shared) {
    if (row + kRows <= streamed_end) {
      stream.copy(ptx::shared_address(shared));
    } else {
      load_queries<Element, kChunks>(p, q, row, kRows, shared, Offset());
    }
  }
};

// Multiplies the chunks of K that this thread copied by a power of two; see round_rows_tf32.
template <int kChunks, typename Offset>
__device__ __forceinline__ void scale_rows_bf16(char* shared, int rows, float scale, Offset offset) {
  const __nv_bfloat162 factor = __float2bfloat162_rn(scale);
  ChunkWalk<kChunks>::each(rows, [&](int row, int chunk) {
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(shared + offset(row, chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __hmul2(pairs[i], factor);
  });
}

// K as the products take it, once its copies have arrived: fp32 rounded to tf32, bf16 times the power of two that
// scores are compared at (fp16 could lose bits of small elements: there the scores are multiplied).
template <typename Element, int kChunks, typename Job, typename Offset>
__device__ __forceinline__ void prepare_keys(const QkPruneParams& p, const Job& job, char* shared, Offset offset) {
  constexpr int kTile = Job::kPlaces;
  for (int tile = job.first_tile; tile < job.end_tile; ++tile) {
    char* const at = shared + offset.tile(tile - job.first_tile);
    if constexpr (std::is_same_v<Element, float>) round_rows_tf32<kChunks>(at, kTile, offset);
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) scale_rows_bf16<kChunks>(at, kTile, p.key_scale, offset);
  }
}

// The same on a word of a fragment.
template <typename Element>
__device__ __forceinline__ void prepare_fragment(const QkPruneParams& p, std::uint32_t& word) {
  if constexpr (std::is_same_v<Element, float>) word = ptx::nearest_tf32(__uint_as_float(word));
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    auto* pair = reinterpret_cast<__nv_bfloat162*>(&word);
    *pair = __hmul2(*pair, __float2bfloat162_rn(p.key_scale));
  }
}

}  // namespace dspattn::cuda::pipeline
