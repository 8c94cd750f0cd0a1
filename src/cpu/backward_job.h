// What the fast CPU backward works out before its tasks begin: sizes, shares, memory. Compiled once, for every target.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "cpu/backward.h"
#include "cpu/job.h"
#include "cpu/tile.h"

namespace dspattn::cpu {

// Query rows that meet a block of keys together: K and V are widened once for this many.
inline constexpr std::int64_t kChunkRows = 256;
inline constexpr std::size_t kChunkTiles = kChunkRows / kTileQ;
// Enough tasks for the cores of a small machine; beyond that, batch and heads are what there is to share out.
inline constexpr std::int64_t kWantedTasks = 8;
// From here on fp32 rounds an LSE by 2^-11 or more, and the weights made from it by as much.
inline constexpr float kFarLse = 8192.0f;
// Shares of dK and dV that wait to be added take at most this much memory.
inline constexpr std::size_t kShareBytes = std::size_t{48} << 20;

struct BackwardJob {
  explicit BackwardJob(const BackwardArgs& args)
      : job(args.problem),
        out(args.out),
        d_out(args.d_out),
        d_q(args.d_q),
        d_k(args.d_k),
        d_v(args.d_v),
        lse(args.lse),
        d_lse(args.d_lse),
        qk(PanelShape::of(job.g.d, job.g.d_v)),
        pv(PanelShape::of(job.g.d_v, job.g.d)) {
    const std::int64_t sharers = std::max<std::int64_t>(1, job.g.batch * job.g.kv_heads);
    const std::int64_t chunks = (job.g.n_q * job.group_heads + kChunkRows - 1) / kChunkRows;
    parts = std::clamp<std::int64_t>(kWantedTasks / sharers, 1, std::max<std::int64_t>(1, chunks));
    const std::size_t bytes = share_elems(job.g.n_k) * sizeof(float) * static_cast<std::size_t>(sharers);
    while (parts > 1 && bytes * static_cast<std::size_t>(parts) > kShareBytes) --parts;
  }

  std::int64_t blocks_of(std::int64_t keys) const { return (keys + job.block_keys - 1) / job.block_keys; }
  std::size_t block_elems() const { return qk.elems() + pv.elems(); }
  // dK and dV of a sequence as panels: for each block those of K, then those of V.
  std::size_t share_elems(std::int64_t keys) const { return static_cast<std::size_t>(blocks_of(keys)) * block_elems(); }

  float lse_at(std::int64_t batch, std::int64_t head, std::int64_t row) const {
    return static_cast<const float*>(lse.data)[batch * lse.step(0) + head * lse.step(1) + row * lse.step(2)];
  }
  float d_lse_at(std::int64_t batch, std::int64_t head, std::int64_t row) const {
    if (!d_lse.present()) return 0.0f;
    return static_cast<const float*>(d_lse.data)[batch * d_lse.step(0) + head * d_lse.step(1) + row * d_lse.step(2)];
  }

  Job job;
  Rows out, d_out, d_q, d_k, d_v;
  ConstTensorView lse;
  ConstTensorView d_lse;  // may be absent
  PanelShape qk, pv;
  std::int64_t parts = 1;  // tasks per (sequence, kv head)
};

// Part `part` takes every parts-th chunk of rows, which evens out the triangle of a causal mask.
struct BackwardTask {
  std::int64_t sequence = 0;
  std::int64_t kv_head = 0;
  std::int64_t part = 0;
};

// What a task works with for one chunk, laid out in the thread's scratch memory.
struct BackwardScratch {
  PruneScratch* prune;
  ScoreTile* d_weights;  // dO V^T, then dS
  KeptRows* kept;
  Slots* slots;  // [kChunkTiles], as all below up to far
  SlotValues* d_scores;
  TileRows* tiles;
  float* q_rows;        // [kTileQ][qk.padded]
  float* q_packed;      // [qk.padded][kTileQ]
  float* d_out_rows;    // [kTileQ][pv.padded]
  float* d_out_packed;  // [pv.padded][kTileQ]
  float* d_q;           // [kTileQ][qk.padded]
  float* lse;           // [kTileQ]
  float* delta;         // [kTileQ]
  float* largest;       // [kTileQ]: this, the next two only of tiles with an LSE that is far off
  float* sum;           // [kTileQ]
  float* rescale;       // [kTileQ]
  bool* far;            // one
  std::uint32_t* nan;   // one: bit r says that forward gave row r NaN
  float* row;           // one row of k, v or out
  float* k_panels;
  float* v_panels;
  float* share;  // dK and dV of the task, when it is the only one of its (sequence, kv head)

  BackwardScratch(Carver& carver, const BackwardJob& run, std::size_t own_share_elems) {
    constexpr std::size_t kRows = kTileQ;
    const std::size_t qk_tile = kRows * static_cast<std::size_t>(run.qk.padded);
    const std::size_t pv_tile = kRows * static_cast<std::size_t>(run.pv.padded);
    prune = carver.take<PruneScratch>(1);
    slots = carver.take<Slots>(kChunkTiles);
    d_scores = carver.take<SlotValues>(kChunkTiles);
    d_weights = carver.take<ScoreTile>(1);
    kept = carver.take<KeptRows>(1);
    tiles = carver.take<TileRows>(kChunkTiles);
    q_rows = carver.take<float>(kChunkTiles * qk_tile);
    q_packed = carver.take<float>(kChunkTiles * qk_tile);
    d_out_rows = carver.take<float>(kChunkTiles * pv_tile);
    d_out_packed = carver.take<float>(kChunkTiles * pv_tile);
    d_q = carver.take<float>(kChunkTiles * qk_tile);
    lse = carver.take<float>(kChunkTiles * kRows);
    delta = carver.take<float>(kChunkTiles * kRows);
    largest = carver.take<float>(kChunkTiles * kRows);
    sum = carver.take<float>(kChunkTiles * kRows);
    rescale = carver.take<float>(kChunkTiles * kRows);
    far = carver.take<bool>(kChunkTiles);
    nan = carver.take<std::uint32_t>(kChunkTiles);
    row = carver.take<float>(static_cast<std::size_t>(std::max(run.qk.padded, run.pv.padded)));
    k_panels = carver.take<float>(run.qk.elems());
    v_panels = carver.take<float>(run.pv.elems());
    share = carver.take<float>(own_share_elems);
  }
};

}  // namespace dspattn::cpu
