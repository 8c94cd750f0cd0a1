// Joins the results of the clusters that had a part of a unit's keys each. A CTA has a row, a thread a column of it,
// and adds its parts in order: the same bits every time.
#include "cuda/decode/launch.h"
#include "cuda/decode/results.h"
#include "cuda/device/device.h"
#include "cuda/ptx/barrier.h"

namespace dspattn::cuda::decode {
namespace {

constexpr int kThreads = 128;
constexpr int kAtOnce = 16;  // parts whose values are on their way together

// Few registers, so that a CTA has room beside those of the kernel that it waits for.
__global__ void __launch_bounds__(kThreads, 8) merge_kernel(const __grid_constant__ Params p, DType type) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int unit = static_cast<int>(blockIdx.x) / p.rows;
  const int row = static_cast<int>(blockIdx.x) - unit * p.rows;
  const int columns = p.results.out.columns;
  const int parts = p.cluster.quotient(p.splits.value);
  const std::int64_t first = static_cast<std::int64_t>(unit) * parts * p.rows + row;
  const int key_head = p.row_tiles.quotient(unit);
  const int batch = p.kv_heads.quotient(key_head);
  const int row_of_key_head = (unit - key_head * p.row_tiles.value) * p.rows + row;
  const tile::PackedRow which = p.packed_row(row_of_key_head);
  const int head = (key_head - batch * p.kv_heads.value) * p.heads_per_kv_head + which.head;

  ptx::start_next_kernel();
  ptx::wait_for_kernels_before();  // the parts are written
  if (row_of_key_head >= p.all_rows) return;
  const tile::RowBand band{p.left, p.right, p.diagonal, tile::visible_keys(p.key_lengths, batch, p.n_k)};
  const auto stats = [&](int i) { return p.partials.stats[first + static_cast<std::int64_t>(i) * p.rows]; };
  RowStats joined{-INFINITY, 0};
  for (int base = 0; base < columns; base += kThreads) {
    const int column = base + static_cast<int>(threadIdx.x);
    const float* out = p.partials.out + first * p.partials.stride + min(column, columns - 1);
    float value = 0;
    for (int begin = 0; begin < parts; begin += kAtOnce) {
      // A part without keys holds zeros: its values need not wait for its stats.
      float loaded[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        loaded[u] = begin + u < parts ? out[static_cast<std::int64_t>(begin + u) * p.rows * p.partials.stride] : 0.0f;
      }
      if (base == 0 && begin == 0) joined = join_parts(parts, lane, p.scales.exponent, p.keeps_rest(), stats);
      const int of_lane = begin + lane % kAtOnce;
      const float factor = of_lane < parts ? part_factor(stats(of_lane), joined.reference, p.scales.exponent) : 0.0f;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) value = fmaf(__shfl_sync(~0u, factor, u), loaded[u], value);
    }
    if (column < columns) {
      float4 x = make_float4(value, 0, 0, 0);
      add_rest(p, batch, head / p.heads_per_kv_head, tile::interval_of(band, which.query), joined, column, 1, x);
      store_result(p.results, type, p.results.out.offset(batch, head, which.query) + column,
                   x.x * normaliser(joined.sum));
    }
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
