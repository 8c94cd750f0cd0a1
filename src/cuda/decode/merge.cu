// Joins the results of the clusters that had a part of a unit's keys each. A CTA has a row; its warps take every fourth
// part, and their sums are added in order: the same bits every time.
#include "cuda/decode/launch.h"
#include "cuda/decode/results.h"
#include "cuda/device/device.h"
#include "cuda/ptx/barrier.h"

namespace dspattn::cuda::decode {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kColumns = 256 / 32;  // of a lane, at the largest head dim

__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ Params p, DType type) {
  __shared__ float sums[kWarps][256];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int unit = static_cast<int>(blockIdx.x) / p.rows;
  const int row = static_cast<int>(blockIdx.x) - unit * p.rows;
  const int columns = p.results.out.columns;
  const int parts = p.cluster.quotient(p.splits.value);
  const std::int64_t first = static_cast<std::int64_t>(unit) * parts * p.rows + row;

  ptx::start_next_kernel();
  ptx::wait_for_kernels_before();  // the parts are written
  const RowStats joined = join_parts(parts, lane, p.scales.exponent, [&](int i) {
    return p.partials.stats[first + static_cast<std::int64_t>(i) * p.rows];
  });
  // A part without keys holds zeros: loads need not wait for its stats.
  float values[kColumns] = {};
#pragma unroll 4
  for (int i = warp; i < parts; i += kWarps) {
    const std::int64_t at = first + static_cast<std::int64_t>(i) * p.rows;
    const float* out = p.partials.out + at * columns;
    float loaded[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) loaded[c] = lane + 32 * c < columns ? out[lane + 32 * c] : 0.0f;
    const float factor = part_factor(p.partials.stats[at], joined.reference, p.scales.exponent);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) values[c] = fmaf(factor, loaded[c], values[c]);
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sums[warp][lane + 32 * c] = values[c];
  __syncthreads();  // all warps' sums are there

  const int key_head = p.row_tiles.quotient(unit);
  const int batch = p.kv_heads.quotient(key_head);
  const int row_of_key_head = (unit - key_head * p.row_tiles.value) * p.rows + row;
  if (row_of_key_head >= p.all_rows) return;
  const tile::PackedRow which = p.packed_row(row_of_key_head);
  const int head = (key_head - batch * p.kv_heads.value) * p.heads_per_kv_head + which.head;
  for (int column = static_cast<int>(threadIdx.x); column < columns; column += kThreads) {
    float value = sums[0][column];
    for (int i = 1; i < kWarps; ++i) value += sums[i][column];
    store_result(p.results, type, p.results.out.offset(batch, head, which.query) + column,
                 normalised(value, joined.sum));
  }
  if (threadIdx.x == 0) {
    store_lse(p.results, p.results.lse.offset(batch, head, which.query), joined, p.scales.exponent);
  }
}

}  // namespace

void launch_merge(const Params& params, DType type, std::int64_t units, cudaStream_t stream) {
  const bool overlaps = current_device_facts().major >= 9;  // with the kernel before, for whose end it waits
  launch("decode merge", merge_kernel,
         {.ctas = grid_of(units * params.rows), .threads = kThreads, .may_overlap = overlaps}, stream, params, type);
}

}  // namespace dspattn::cuda::decode
