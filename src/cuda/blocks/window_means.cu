// The table of means under windows (tile/means.h). Of the rows of a wide window: of whole blocks, from sums of V over
// each that a kernel before has written, a warp four neighbouring pairs of ends. Of rows with an entry of their own,
// all of a narrow window and the last of a wide one: a CTA has 256 of them and a word of each lane's columns, brings V
// of what they see to shared memory, once and all at once, adds up segments of it, and then a warp has 16 rows at a
// time.
#include <algorithm>
#include <type_traits>

#include "cuda/blocks/interval_sums.h"
#include "cuda/blocks/means.h"
#include "cuda/blocks/means_sequence.h"
#include "cuda/device/device.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/load_if.h"
#include "cuda/tile/mean_windows.h"

namespace dspattn::cuda::blocks {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
// Pairs of ends of blocks that a warp has: few, which wait for memory one after another in windows of few blocks, and
// not one, which would share no sums in the widest ones.
constexpr int kRanks = 4;
constexpr int kRanksOfCta = kWarps * kRanks;
constexpr int kBlockColumns = 64;
constexpr int kRows = 16;  // whose means a warp computes together

// A lane's columns of a head's entries.
template <int kColumns>
struct Entries {
  std::uint8_t* first;
  std::uint32_t bytes;  // of an entry; unsigned, for one instruction that finds it

  __device__ __forceinline__ Entries(const MeansParams& params, int head, int column)
      : first(reinterpret_cast<std::uint8_t*>(params.means + head * params.table.entries * params.stride + column)),
        bytes(static_cast<std::uint32_t>(params.stride) * static_cast<std::uint32_t>(sizeof(float))) {}

  // `share`: of each of the keys that are added up.
  __device__ __forceinline__ void write(int entry, const ColumnSums<kColumns>& sums, float share) const {
    auto* to = reinterpret_cast<float*>(first + std::uint64_t{static_cast<std::uint32_t>(entry)} * bytes);
    if constexpr (kColumns == 2) {
      *reinterpret_cast<float2*>(to) = make_float2(sums.of[0] * share, sums.of[1] * share);
    } else {
      *to = sums.of[0] * share;
    }
  }
};

// Sums of a sequence's blocks, at a lane's two columns.
struct BlockItems {
  using Word = float2;
  using Sums = ColumnSums<2>;
  const float* first;  // of block 0
  int step;            // floats

  __device__ __forceinline__ const float* cursor(int block) const { return first + std::int64_t{block} * step; }
  __device__ __forceinline__ static float2 load_if(bool there, const float* cursor) {
    return there ? *reinterpret_cast<const float2*>(cursor) : float2{};
  }
  __device__ __forceinline__ static Sums sums(const float2& word) { return {{word.x, word.y}}; }
  __device__ __forceinline__ Sums between(int begin, int end) const {
    constexpr int kAtOnce = 8;
    Sums total;
#pragma unroll 1
    for (; begin < end; begin += kAtOnce) {
      float2 words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) words[i] = load_if(begin + i < end, cursor(begin + i));
#pragma unroll
      for (const float2& word : words) total.add(sums(word));
    }
    return total;
  }
};

__global__ void __launch_bounds__(kThreads) block_means(const MeansParams params, const PanelTasks tasks) {
  ptx::wait_for_kernels_before();
  ptx::start_next_kernel();
  const PanelTask task(tasks);
  const Sequence sequence = sequence_of(params, task.sequence);
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  const int first = task.part * kRanksOfCta + static_cast<int>(threadIdx.x) / 32 * kRanks;
  const int ranks = min(kRanks, tile::block_ranks(sequence.key_length) - first);
  if (ranks <= 0) return;
  const tile::KeyBlockRange own = tile::blocks_of_rank(band_of(params.work, sequence), first + min(lane, ranks - 1));
  const int column = task.panel * kBlockColumns + 2 * lane;
  const std::int64_t place = task.head * params.table.all_blocks + params.table.block_of(sequence.place);
  const Entries<2> entries(params, task.head, column);
  const int entry = params.table.entry_of_blocks(sequence.place, {0, 1}) + first;
  sum_intervals<kRanks>({own.begin, own.end}, BlockItems{params.sums + place * params.stride + column, params.stride},
                        [&](int i, const ColumnSums<2>& sums) {
                          const int blocks = __shfl_sync(~0u, own.end - own.begin, i);
                          if (i < ranks && blocks > 0)
                            entries.write(entry + i, sums, share_of(blocks * tile::kBlockKeys));
                        });
}

// V of a chunk of rows in shared memory: of every key a word of each lane, two numbers of 16 bits or one of 32.
template <DType kType>
struct Panel {
  static constexpr int kWordColumns = kType == DType::f32 ? 1 : 2;
  static constexpr int kColumns = 32 * kWordColumns;
  static constexpr int kChunks = 8;  // of a key: 16 bytes that a thread copies
  using Element = std::conditional_t<kType == DType::f32, float, std::uint16_t>;
  using Word = std::uint32_t;
  using Sums = ColumnSums<kWordColumns>;

  tile::ChunkKeys chunk;
  Word* words;            // [places][32]
  Sums* segments;         // [places / kSegmentKeys][32]
  std::uint32_t address;  // of the lane's word of key 0
  static constexpr std::uint32_t step = 32 * sizeof(Word);

  __device__ __forceinline__ Panel(const tile::ChunkKeys& of_chunk, Word* shared, int places)
      : chunk(of_chunk),
        words(shared),
        segments(reinterpret_cast<Sums*>(shared + places * 32)),
        address(ptx::shared_address(shared + lane()) - static_cast<std::uint32_t>(chunk.first_place()) * step) {}

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }

  __device__ __forceinline__ std::uint32_t cursor(int key) const {
    return address + static_cast<std::uint32_t>(key) * step;
  }
  __device__ __forceinline__ static Word load_if(std::uint32_t there, std::uint32_t cursor) {
    return ptx::load_shared_if(cursor, there);
  }
  __device__ __forceinline__ static Sums sums(Word word) {
    if constexpr (kType == DType::f32) {
      return {{__uint_as_float(word)}};
    } else {
      return {{number_of<kType>(word), number_of<kType>(word >> 16)}};
    }
  }

  // Of the keys of a part of one segment.
  __device__ __forceinline__ void add_keys(int begin, int end, Sums& total) const {
#pragma unroll 4
    for (int key = begin; key < end; ++key) total.add(sums(ptx::load_shared(cursor(key))));
  }
  __device__ __forceinline__ Sums between(int begin, int end) const {
    constexpr int kKeys = tile::kSegmentKeys;
    const int first = (begin + kKeys - 1) / kKeys, last = end / kKeys;
    Sums total;
    add_keys(begin, min(end, first * kKeys), total);
    const Sums* own = segments + lane() - chunk.first_place() / kKeys * 32;
#pragma unroll 4
    for (int i = first; i < last; ++i) total.add(own[i * 32]);
    if (first <= last) add_keys(last * kKeys, end, total);
    return total;
  }

  // All keys are on their way before the first has arrived. `rows`: V of the head; columns past its last are 0.
  __device__ __forceinline__ void bring(const MeansParams& params, const Element* rows, int first_column) const {
    constexpr int kWidth = kColumns / kChunks;
    constexpr int kStep = kThreads / kChunks;
    const int first_key = chunk.keys.begin + static_cast<int>(threadIdx.x) / kChunks;
    const int column = first_column + static_cast<int>(threadIdx.x) % kChunks * kWidth;
    const std::int64_t row_step = kStep * params.v.row_stride;
    Word* to = words + (first_key - chunk.first_place()) * 32 + static_cast<int>(threadIdx.x) % kChunks * 4;
    const Element* from = rows + first_key * params.v.row_stride + column;
    if (params.vector != 0) {
      const bool there = column < params.columns;
      std::uint32_t to_address = ptx::shared_address(to);
#pragma unroll 4
      for (int key = first_key; key < chunk.keys.end; key += kStep) {
        ptx::copy_async_16(to_address, there ? from : rows, there ? 16 : 0);
        to_address += kStep * step;
        from += row_step;
      }
    } else {
#pragma unroll 1
      for (int key = first_key; key < chunk.keys.end; key += kStep) {
        auto* elements = reinterpret_cast<Element*>(to);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) elements[i] = column + i < params.columns ? from[i] : Element{};
        to += kStep * 32;
        from += row_step;
      }
    }
    ptx::copy_async_wait();
    __syncthreads();  // they are there
  }

  __device__ __forceinline__ void sum_segments() const {
    for (int i = warp(); i < chunk.segments(); i += kWarps) {
      Word own[tile::kSegmentKeys];
#pragma unroll
      for (int key = 0; key < tile::kSegmentKeys; ++key) own[key] = words[(i * tile::kSegmentKeys + key) * 32 + lane()];
      Sums total;
#pragma unroll
      for (const Word word : own) total.add(sums(word));
      segments[i * 32 + lane()] = total;
    }
    __syncthreads();  // all segments' sums are known
  }
};

// A chunk of the rows that have entries of their own, and blocks that none before them see as a whole.
template <DType kType>
__global__ void __launch_bounds__(kThreads, 4)
    own_row_means(const MeansParams params, const PanelTasks tasks, int places) {
  using Own = Panel<kType>;
  DSPATTN_ALIGNED_SHARED(std::uint32_t, words, 16);
  ptx::wait_for_kernels_before();
  ptx::start_next_kernel();
  const PanelTask task(tasks);
  const Sequence sequence = sequence_of(params, task.sequence);
  const tile::RowBand band = band_of(params.work, sequence);
  const tile::RowSpan rows =
      params.table.by_row != 0 ? tile::RowSpan{0, sequence.rows} : tile::rows_of_last_keys(band, sequence.rows);
  const int begin = rows.begin + task.part * tile::kRowsOfChunk;
  const int end = min(begin + tile::kRowsOfChunk, rows.begin + rows.count);
  if (begin >= end) return;
  const Own panel(tile::chunk_keys(band, begin, end), words, places);
  panel.bring(params, values_of<typename Own::Element>(params, sequence, task.head), task.panel * Own::kColumns);
  panel.sum_segments();
  const Entries<Own::kWordColumns> entries(params, task.head,
                                           task.panel * Own::kColumns + Own::lane() * Own::kWordColumns);
  if (params.table.by_row != 0) {
    const tile::KeyBlockRange whole = tile::whole_blocks(panel.chunk.keys);
    const int block = whole.begin + Own::warp();  // there are four at most
    const int row = tile::first_row_with(band, block);
    if (block < whole.end && row >= begin && row < end &&
        tile::keys_within(band, row).begin <= block * tile::kBlockKeys) {
      entries.write(params.table.entry_of_blocks(sequence.place, {block, block + 1}),
                    panel.between(block * tile::kBlockKeys, (block + 1) * tile::kBlockKeys),
                    share_of(tile::kBlockKeys));
    }
  }
#pragma unroll 1
  for (int first = begin + Own::warp() * kRows; first < end; first += kWarps * kRows) {
    const int row = min(first + Own::lane(), end - 1);
    const tile::KeyInterval own = tile::keys_within(band, row);
    const std::uint32_t written =
        __ballot_sync(~0u, first + Own::lane() < end && tile::has_own_entry(params.table, own));
    const int entry = params.table.entry(sequence.place, band, row);
    const float share = share_of(own.end - own.begin);
    sum_intervals<kRows>(own, panel, [&](int i, const typename Own::Sums& sums) {
      if ((written >> i & 1) == 0) return;
      entries.write(__shfl_sync(~0u, entry, i), sums, __shfl_sync(~0u, share, i));
    });
  }
}

// `rows`: of a sequence, at most.
template <DType kType>
void launch_rows(const MeansParams& params, int rows, cudaStream_t stream) {
  using Own = Panel<kType>;
  constexpr int kSegmentBytes = 32 * (tile::kSegmentKeys * sizeof(typename Own::Word) + sizeof(typename Own::Sums));
  constexpr int kMostSegments = tile::kMostChunkPlaces / tile::kSegmentKeys;
  allow_shared_memory(&own_row_means<kType>, kMostSegments * kSegmentBytes);
  const int places = tile::chunk_places(params.table, params.work.left, params.work.right);
  const PanelTasks tasks{tile::Divisor(params.heads), tile::Divisor(tile::divide_up(rows, tile::kRowsOfChunk)),
                         tile::Divisor(params.stride / Own::kColumns)};
  launch("the means of V by rows", &own_row_means<kType>,
         {.ctas = grid_of(tasks.count(params.sequences)),
          .threads = kThreads,
          .shared_bytes = places / tile::kSegmentKeys * kSegmentBytes,
          .may_overlap = true},
         stream, params, tasks, places);
}

void launch_rows(const MeansParams& params, int rows, cudaStream_t stream) {
  if (params.type == DType::bf16) return launch_rows<DType::bf16>(params, rows, stream);
  if (params.type == DType::f16) return launch_rows<DType::f16>(params, rows, stream);
  launch_rows<DType::f32>(params, rows, stream);
}

// At most, of a sequence under a wide window. Where lengths are on the device alone, there may be some.
int most_rows_of_last_keys(const WorkParams& work) {
  if (work.cumulative_q.present() || work.key_lengths.present()) return std::min(work.n_q, tile::kLastKeys);
  return tile::rows_of_last_keys(band_of(work, {{}, 0, work.n_q, work.n_k, work.n_k}), work.n_q).count;
}

}  // namespace

void launch_row_means(const MeansParams& params, cudaStream_t stream) { launch_rows(params, params.work.n_q, stream); }

void launch_window_means(const MeansParams& params, cudaStream_t stream) {
  if (const int ranks = tile::block_ranks(params.work.n_k); ranks > 0 && params.table.all_blocks > 0) {
    const PanelTasks tasks{tile::Divisor(params.heads), tile::Divisor(tile::divide_up(ranks, kRanksOfCta)),
                           tile::Divisor(params.stride / kBlockColumns)};
    launch("the means of V under windows", &block_means,
           {.ctas = grid_of(tasks.count(params.sequences)), .threads = kThreads, .may_overlap = true}, stream, params,
           tasks);
  }
  if (const int rows = most_rows_of_last_keys(params.work); rows > 0) launch_rows(params, rows, stream);
}

}  // namespace dspattn::cuda::blocks
