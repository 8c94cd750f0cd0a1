// pv_sparse on Hopper: the product of cuda/pipeline/sm80/pv_sparse.cuh with wgmma.sp, for d_v up to 64.
//
// A CTA per multiprocessor (or a few) takes jobs, kRows rows by all columns of one (batch, head), and walks over tiles
// of 128 bytes of nonzeros a row (128 places of a 16-bit type, 64 of fp32). One warp asks TMA, which fills a ring of
// stages with nonzeros, metadata and V rows, and runs ahead into the next job; kGroups warpgroups multiply, kProducts
// times 64 rows each. Nonzeros and V are read by the tensor core where the copies put them; the only thing that passes
// through registers is metadata (lane_word). tf32 operands must be K-major, so four more warps transpose fp32 V. TMA
// rounds fp32 to tf32.
//
// Requires what cuda/pipeline/sm80/pv_sparse.cuh requires, V that TMA can address, whole blocks of 128 keys if groups
// are interleaved, and sm_90a.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/pipeline/common/pv_job.h"
#include "cuda/pipeline/sm90/common.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_shapes.h"
#include "cuda/ptx/wgmma_tf32_shapes.h"

namespace dspattn::cuda::pipeline::sm90 {

struct PvLaunch {
  PvSparseParams common;
  int jobs = 0;
  CUtensorMap nonzeros;  // (column, row, matrix, 1), boxes of 128 bytes by kRows
  CUtensorMap values;    // (column, element, row, head, batch), boxes of a panel by 64 places
};

// Rows of a CTA: 64 * kProducts * kGroups.
template <typename Type, int kProductsOfGroup, int kGroupsOfCta>
struct PvConfig {
  using Element = Type;
  static constexpr bool kFp32 = sizeof(Element) == 4;
  static constexpr int kProducts = kProductsOfGroup, kGroups = kGroupsOfCta;
  static constexpr int kRows = 64 * kProducts * kGroups;
  static constexpr int kColumns = 64;
  static constexpr int kTile = 256 / static_cast<int>(sizeof(Element));  // places
  static constexpr int kStepPlaces = places_per_word_column(sizeof(Element));
  static constexpr int kSteps = kTile / kStepPlaces;
  static constexpr int kBoxPlaces = 64;  // V rows of a copy: a tile of a 16-bit type may be two blocks of 64
  static constexpr int kPanels = kColumns * static_cast<int>(sizeof(Element)) / kPanelBytes;
  static constexpr int kNonzeroBytes = kRows * kPanelBytes;
  static constexpr int kValueBytes = kTile * kPanels * kPanelBytes;
  static constexpr int kBoxBytes = kBoxPlaces * kPanelBytes;
  static constexpr int kMetadataBytes = kRows * 4 * kSteps;
  static constexpr int kStageBytes = kNonzeroBytes + kValueBytes + kMetadataBytes;
  static constexpr int kTransposed = kFp32 ? 2 : 0;  // tiles of transposed V
  // That share a multiprocessor.
  static constexpr int kCtas = kRows == 64 ? (kFp32 ? 2 : 3) : kRows == 128 && !kFp32 ? 2 : 1;
  static constexpr int kRoom = (227 * 1024 / kCtas - 2048) / 1024 * 1024;
  static constexpr int kStagesThatFit = (kRoom - kTransposed * kValueBytes) / kStageBytes;
  static constexpr int kStages = kStagesThatFit < 4 ? kStagesThatFit : 4;
  static_assert(kStages >= 2 && kStageBytes % 1024 == 0);
  static constexpr int kBarriers = 2 * (kStages + kTransposed);
  static constexpr int kSharedBytes = kTransposed * kValueBytes + kStages * kStageBytes + 8 * kBarriers;
  static constexpr int kConsumerWarps = 4 * kGroups, kTransposerWarps = kFp32 ? 4 : 0;
  static constexpr int kThreads = 32 * (kConsumerWarps + 1 + kTransposerWarps);
};

// A stage of the ring and the parity of its current use.
template <int kStages>
struct RingPlace {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <typename Config>
struct PvShared {
  std::uint32_t base;  // transposed V, the stages, the barriers

  __device__ __forceinline__ std::uint32_t transposed(int i) const {
    return base + static_cast<std::uint32_t>(i * Config::kValueBytes);
  }
  __device__ __forceinline__ std::uint32_t nonzeros(int stage) const {
    return transposed(Config::kTransposed) + static_cast<std::uint32_t>(stage * Config::kStageBytes);
  }
  __device__ __forceinline__ std::uint32_t values(int stage) const { return nonzeros(stage) + Config::kNonzeroBytes; }
  __device__ __forceinline__ std::uint32_t metadata(int stage) const { return values(stage) + Config::kValueBytes; }
  __device__ __forceinline__ std::uint32_t barrier(int i) const {
    return nonzeros(Config::kStages) + static_cast<std::uint32_t>(8 * i);
  }
  // full: the copies have arrived; empty: all who read the stage are done.
  __device__ __forceinline__ std::uint32_t full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ std::uint32_t empty(int stage) const { return barrier(Config::kStages + stage); }
  // The same of transposed tiles.
  __device__ __forceinline__ std::uint32_t turned(int i) const { return barrier(2 * Config::kStages + i); }
  __device__ __forceinline__ std::uint32_t used(int i) const {
    return barrier(2 * Config::kStages + Config::kTransposed + i);
  }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::mbarrier_init(full(i), 1);
      ptx::mbarrier_init(empty(i), Config::kConsumerWarps + Config::kTransposerWarps);
    }
    for (int i = 0; i < Config::kTransposed; ++i) {
      ptx::mbarrier_init(turned(i), Config::kTransposerWarps);
      ptx::mbarrier_init(used(i), Config::kConsumerWarps);
    }
    ptx::mbarrier_init_fence();
  }
};

template <typename Config>
__device__ __forceinline__ PvJob job_of(const PvLaunch& launch, int number) {
  return pv_job(launch.common, number, Config::kRows, Config::kColumns);
}

// The warp that asks TMA; lane 0 does. The others know which blocks the next slots are.
template <typename Config>
struct PvProducer {
  const PvLaunch& launch;
  const PvShared<Config>& shared;

  // The metadata of a tile, `columns` word columns of it: whole rows at once, or by units of 32 rows where the matrix
  // ends; units past it repeat the last one, for metadata must be valid even where results are not stored.
  __device__ __forceinline__ void load_metadata(const PvJob& job, int place, int columns, int stage) const {
    const PvSparseParams& p = launch.common;
    const std::uint32_t* words = p.weights.metadata + job.matrix * p.weights.metadata_words +
                                 static_cast<std::int64_t>(place / Config::kStepPlaces) * p.weights.rows;
    std::uint32_t to = shared.metadata(stage);
    const int rows = static_cast<int>(p.weights.rows);
    const bool whole = job.row0 + Config::kRows <= rows;
    for (int column = 0; column < columns; ++column, words += rows, to += 4 * Config::kRows) {
      if (whole) {
        ptx::bulk_load(to, words + job.row0, 4 * Config::kRows, shared.full(stage));
      } else {
        for (int unit = 0; unit < Config::kRows; unit += kRowUnit) {
          ptx::bulk_load(to + static_cast<std::uint32_t>(4 * unit), words + weight_row(p, job, unit), 4 * kRowUnit,
                         shared.full(stage));
        }
      }
    }
  }

  // keys[i]: the first key of the tile's i-th box.
  __device__ __forceinline__ void load(const PvJob& job, int place, int stage,
                                       const int (&keys)[Config::kTile / Config::kBoxPlaces]) const {
    const PvSparseParams& p = launch.common;
    const int columns = min(Config::kSteps, (job.end_place - place) / Config::kStepPlaces);
    const int boxes = min(Config::kTile, job.end_place - place + Config::kBoxPlaces - 1) / Config::kBoxPlaces;
    ptx::mbarrier_arrive_expect(shared.full(stage), Config::kNonzeroBytes + columns * 4 * Config::kRows +
                                                        boxes * Config::kPanels * Config::kBoxBytes);
    ptx::tma_load_4d(shared.nonzeros(stage), &launch.nonzeros, shared.full(stage), place / 2, job.row0, job.matrix, 0);
    load_metadata(job, place, columns, stage);
    std::uint32_t to = shared.values(stage);
#pragma unroll
    for (int box = 0; box < Config::kTile / Config::kBoxPlaces; ++box) {
      if (box >= boxes) break;
      for (int panel = 0; panel < Config::kPanels; ++panel, to += Config::kBoxBytes) {
        ptx::tma_load_5d(to, &launch.values, shared.full(stage), panel * (Config::kColumns / Config::kPanels), 0,
                         keys[box], job.head(p) / p.heads_per_kv, job.batch(p));
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const PvSparseParams& p = launch.common;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    RingPlace<Config::kStages> at;
    for (int number = static_cast<int>(blockIdx.x); number < launch.jobs; number += static_cast<int>(gridDim.x)) {
      const PvJob job = job_of<Config>(launch, number);
      const int end_slot = (job.end_place + p.walk.block - 1) / p.walk.block;
      int first_slot = 0, lane_block = 0;
      for (int place = job.first_place; place < job.end_place; place += Config::kTile, at.advance()) {
        // The blocks of 32 slots at a time, one a lane: nothing waits for the mask tile by tile. A tile has one slot or
        // two, and 32 is even.
        if (place == job.first_place || place / p.walk.block - first_slot >= 32) {
          first_slot = place / p.walk.block;
          const int slot = first_slot + lane;
          lane_block = slot < end_slot ? p.walk.key_block(job.row_block, slot) * p.walk.block : 0;
        }
        int keys[Config::kTile / Config::kBoxPlaces];
#pragma unroll
        for (int box = 0; box < Config::kTile / Config::kBoxPlaces; ++box) {
          const int from = place + box * Config::kBoxPlaces;
          keys[box] = __shfl_sync(~0u, lane_block, from / p.walk.block - first_slot) +
                      key_in_block(from & (p.walk.block - 1), p.group_log2, p.interleaved);
        }
        if (lane == 0) {
          ptx::mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);
          load(job, place, at.stage, keys);
        }
        __syncwarp();
      }
    }
  }
};

// V rows of a tile that lie past the sequence's key length, while the tensor does not end there, become zeros: their
// weights are 0, but 0 times NaN is not. `threads` threads from `thread` on; true if anything was written.
template <typename Config>
__device__ __forceinline__ bool clear_values(const PvSparseParams& p, const PvJob& job, int place, std::uint32_t values,
                                             int thread, int threads) {
  if (p.walk.key_lengths == nullptr) return false;
  bool any = false;
  for (int i = thread; i < Config::kTile * Config::kPanels; i += threads) {
    const int row = i / Config::kBoxPlaces / Config::kPanels * Config::kBoxPlaces + i % Config::kBoxPlaces;
    const int at = place + row;
    if (at >= job.end_place) continue;
    const int key = p.walk.key_block(job.row_block, at / p.walk.block) * p.walk.block +
                    key_in_block(at & (p.walk.block - 1), p.group_log2, p.interleaved);
    if (key < job.key_length) continue;
    any = true;
    for (std::uint32_t chunk = 0; chunk < kPanelBytes; chunk += 16) {
      ptx::store_shared_16(values + static_cast<std::uint32_t>(i * kPanelBytes) + chunk, 0, 0, 0, 0);
    }
  }
  return any;
}

// The warps that transpose fp32 V: columns become rows, in panels of 32 places; each thread takes a column, four places
// at a time. Lanes are neighbouring columns: neither the reads nor the swizzled writes meet in a bank.
template <typename Config>
__device__ __forceinline__ void transpose_values(const PvLaunch& launch, const PvShared<Config>& shared) {
  constexpr int kThreads = 32 * Config::kTransposerWarps;
  constexpr int kQuadStep = kThreads / Config::kColumns;
  const int thread = static_cast<int>(threadIdx.x) - 32 * (Config::kConsumerWarps + 1);
  const int column = thread % Config::kColumns, first_quad = thread / Config::kColumns;
  RingPlace<Config::kStages> at;
  RingPlace<Config::kTransposed> to;
  for (int number = static_cast<int>(blockIdx.x); number < launch.jobs; number += static_cast<int>(gridDim.x)) {
    const PvJob job = job_of<Config>(launch, number);
    for (int place = job.first_place; place < job.end_place; place += Config::kTile, at.advance(), to.advance()) {
      ptx::mbarrier_wait(shared.full(at.stage), at.parity);
      if (launch.common.walk.key_lengths != nullptr) {
        clear_values<Config>(launch.common, job, place, shared.values(at.stage), thread, kThreads);
        ptx::named_barrier_sync(1, kThreads);  // the cleared rows are visible to all who transpose
      }
      ptx::mbarrier_wait(shared.used(to.stage), to.parity ^ 1);
      const std::uint32_t from = shared.values(at.stage) + static_cast<std::uint32_t>(column / 32 * Config::kBoxBytes);
#pragma unroll
      for (int i = 0; i < Config::kTile / 4 / kQuadStep; ++i) {
        const int quad = first_quad + i * kQuadStep;
        std::uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = 4 * quad + j;
          words[j] = ptx::load_shared(
              from + static_cast<std::uint32_t>(swizzled_wide(row, column % 32 / 4, kPanelBytes) + column % 4 * 4));
        }
        ptx::store_shared_16(
            shared.transposed(to.stage) + static_cast<std::uint32_t>(panel_offset(Config::kColumns, column, quad)),
            words[0], words[1], words[2], words[3]);
      }
      ptx::fence_async_proxy();
      __syncwarp();  // this warp's part is written, and visible to the tensor core
      if (threadIdx.x % 32 == 0) {
        ptx::mbarrier_arrive(shared.turned(to.stage));
        ptx::mbarrier_arrive(shared.empty(at.stage));
      }
    }
  }
}

// A warpgroup that multiplies.
template <typename Config>
struct PvConsumer {
  using Element = typename Config::Element;
  const PvLaunch& launch;
  const PvShared<Config>& shared;

  // Issues the products of one step. a, b: the low words of the operands' descriptors at step 0.
  __device__ __forceinline__ void issue(float (&acc)[Config::kProducts][32], std::uint32_t a, std::uint32_t b, int step,
                                        const std::uint32_t (&codes)[Config::kProducts]) const {
    // fp32: 64 bytes of places a step, two steps a panel of transposed V.
    const int b_bytes = Config::kFp32 ? step / 2 * Config::kColumns * kPanelBytes + step % 2 * 2 * kStepBytes
                                      : step * Config::kStepPlaces * kPanelBytes;
    const std::uint64_t values = ptx::descriptor(b + static_cast<std::uint32_t>(b_bytes >> 4));
#pragma unroll
    for (int i = 0; i < Config::kProducts; ++i) {
      const std::uint64_t nonzeros =
          ptx::descriptor(a + static_cast<std::uint32_t>((64 * i * kPanelBytes + step * kStepBytes) >> 4));
      if constexpr (Config::kFp32) {
        ptx::wgmma_tf32_sparse_stored(acc[i], nonzeros, values, codes[i]);
      } else {
        constexpr DType kType = std::is_same_v<Element, __half> ? DType::f16 : DType::bf16;
        ptx::wgmma_sparse_stored<kType>(acc[i], nonzeros, values, codes[i]);
      }
    }
  }

  // acc += one tile, of which the job has `steps` word columns. word: offset of this lane's metadata in a column.
  __device__ __forceinline__ void multiply(float (&acc)[Config::kProducts][32], int stage, std::uint32_t values,
                                           int steps, int group_row, std::uint32_t word) const {
    const std::uint32_t metadata = shared.metadata(stage) + word;
    const auto code = [&](int step, int i) {
      return ptx::load_shared(metadata + static_cast<std::uint32_t>(4 * (step * Config::kRows + 64 * i)));
    };
    const std::uint32_t a =
        ptx::descriptor_low(shared.nonzeros(stage) + static_cast<std::uint32_t>(group_row * kPanelBytes), 16);
    const std::uint32_t b = ptx::descriptor_low(values, Config::kFp32 ? 16 : Config::kValueBytes);
    if (steps >= Config::kSteps) {
      std::uint32_t codes[Config::kSteps][Config::kProducts];
#pragma unroll
      for (int i = 0; i < Config::kSteps * Config::kProducts; ++i) {
        codes[i / Config::kProducts][i % Config::kProducts] = code(i / Config::kProducts, i % Config::kProducts);
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < Config::kSteps; ++step) issue(acc, a, b, step, codes[step]);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
    } else {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        std::uint32_t codes[Config::kProducts];
#pragma unroll
        for (int i = 0; i < Config::kProducts; ++i) codes[i] = code(step, i);
        ptx::wgmma_fence();
        issue(acc, a, b, step, codes);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
      }
    }
  }

  __device__ __forceinline__ void store(const PvJob& job, int row, float (&acc)[Config::kProducts][32]) const {
    const PvSparseParams& p = launch.common;
#pragma unroll
    for (int i = 0; i < 2 * Config::kProducts; ++i) {
      const std::int64_t at = row + 64 * (i / 2) + 8 * (i % 2);
      store_row<Element>(p, job, at, reinterpret_cast<float(&)[8][4]>(acc[i / 2]), i % 2);
    }
  }

  __device__ __forceinline__ void run() const {
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int group_row = warp / 4 * 64 * Config::kProducts, warp_row = warp % 4 * 16;
    const auto word = static_cast<std::uint32_t>(4 * lane_word(group_row + warp_row, lane));
    RingPlace<Config::kStages> at;
    RingPlace<Config::kTransposed> turn;
    for (int number = static_cast<int>(blockIdx.x); number < launch.jobs; number += static_cast<int>(gridDim.x)) {
      const PvJob job = job_of<Config>(launch, number);
      float acc[Config::kProducts][32];
#pragma unroll
      for (int i = 0; i < 32 * Config::kProducts; ++i) acc[i / 32][i % 32] = 0.0f;
      for (int place = job.first_place; place < job.end_place; place += Config::kTile, at.advance()) {
        ptx::mbarrier_wait(shared.full(at.stage), at.parity);
        std::uint32_t values = shared.values(at.stage);
        if constexpr (Config::kFp32) {
          ptx::mbarrier_wait(shared.turned(turn.stage), turn.parity);
          values = shared.transposed(turn.stage);
        } else if (launch.common.walk.key_lengths != nullptr) {
          // Every warpgroup clears all of it: the same zeros, and no barrier between warpgroups.
          clear_values<Config>(launch.common, job, place, values, static_cast<int>(threadIdx.x) % kGroupThreads,
                               kGroupThreads);
          ptx::fence_async_proxy();
          ptx::named_barrier_sync(1 + warp / 4, kGroupThreads);
        }
        multiply(acc, at.stage, values, (job.end_place - place) / Config::kStepPlaces, group_row, word);
        if (lane == 0) {
          ptx::mbarrier_arrive(shared.empty(at.stage));
          if constexpr (Config::kFp32) ptx::mbarrier_arrive(shared.used(turn.stage));
        }
        if constexpr (Config::kFp32) turn.advance();
      }
#pragma unroll
      for (int i = 0; i < Config::kProducts; ++i) ptx::pin_accumulators(acc[i]);
      store(job, job.row0 + group_row + warp_row + lane / 4, acc);
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtas)
    pv_sparse_kernel(const __grid_constant__ PvLaunch launch) {
  DSPATTN_ALIGNED_SHARED(char, base, 1024);
  const PvShared<Config> shared{ptx::shared_address(base)};
  if (threadIdx.x == 0) shared.init();
  __syncthreads();  // the barriers are set
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < Config::kConsumerWarps) {
    PvConsumer<Config>{launch, shared}.run();
  } else if (warp == Config::kConsumerWarps) {
    PvProducer<Config>{launch, shared}.run();
  } else if constexpr (Config::kFp32) {
    transpose_values<Config>(launch, shared);
  }
}

}  // namespace dspattn::cuda::pipeline::sm90
