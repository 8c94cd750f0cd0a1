#include "cuda/sm90/backward/backward.h"

#include <algorithm>

#include "core/geometry.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/device/device.h"
#include "cuda/sm90/backward/mask_words.h"
#include "cuda/sm90/backward/rows_kernels.h"
#include "cuda/sm90/common/forward.h"
#include "cuda/tile/key_rows.h"

namespace dspattn::cuda::sm90::backward {
namespace {

Scratch scratch_of(const ScratchOffsets& at, void* workspace) {
  auto* base = static_cast<std::uint8_t*>(workspace);
  return {base + at.q,
          base + at.d_out,
          base + at.numbers,
          reinterpret_cast<float*>(base + at.sums),
          reinterpret_cast<std::int32_t*>(base + at.counts),
          reinterpret_cast<std::int32_t*>(base + at.ready),
          reinterpret_cast<std::int32_t*>(base + at.prepared),
          reinterpret_cast<std::int32_t*>(base + at.finished),
          reinterpret_cast<std::int32_t*>(base + at.taken)};
}

MaskWordsParams mask_words_of(const BackwardPlan& plan, const BackwardArgs& args, const BackwardParams& params) {
  const ConstTensorView& allowed = args.problem.mask.allowed;
  MaskWordsParams m;
  m.mask = params.allowed;
  m.key_map = params.keys;
  m.heads = static_cast<int>(plan.mask.heads);
  m.query_tiles = static_cast<int>(plan.mask.query_tiles);
  m.key_blocks = static_cast<int>(plan.mask.key_blocks);
  m.rows = allowed.extent(2) == 1 ? plan.tile_q : static_cast<int>(allowed.extent(2));  // one is that of all rows
  m.keys = params.work.n_k;
  const std::int64_t steps = m.mask.batch_stride | m.mask.head_stride | m.mask.row_stride;
  m.words = m.mask.key_stride == 1 && (steps | reinterpret_cast<std::intptr_t>(allowed.data)) % 4 == 0 ? 1 : 0;
  m.first_key = params.first_key_tile / params.block_tiles * tile::kBlockKeys;
  m.blocks = plan.mask.count();
  m.to = params.mask_words.data;
  return m;
}

BackwardParams params_of(const BackwardKernel& kernel, const BackwardPlan& plan, const BackwardArgs& args) {
  const Problem& problem = args.problem;
  const core::Geometry geometry = core::geometry_of(problem);
  const auto flag = [](const ConstTensorView& tensor) { return is_vector(tensor) ? 1 : 0; };
  BackwardParams p;
  set_tensors(p, args);
  p.bias_bytes = bias_bytes_of(problem.mask);
  p.bias_copied = plan.bias_copied ? 1 : 0;
  if (const MaskBlocks& mask = plan.mask; mask.count() > 0) {
    const auto step = [](std::int64_t extent, std::int64_t blocks) {
      return extent > 1 ? static_cast<int>(blocks) : 0;
    };
    p.mask_words = {
        reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(args.run.workspace) + plan.scratch.mask_words),
        step(mask.sequences, mask.heads * mask.query_tiles * mask.key_blocks),
        step(mask.heads, mask.query_tiles * mask.key_blocks), step(mask.query_tiles, mask.key_blocks)};
  }
  p.work = blocks::work_of(problem);
  p.keys = tile::key_row_map(pattern_of(kernel.selection), problem.grouping, plan.score_keys);
  p.scales = blocks::scales_of(kernel.type, geometry.scale, problem.mask.bias.present());
  p.scratch = scratch_of(plan.scratch, args.run.workspace);
  p.type = kernel.type;
  p.dim = plan.dim;
  p.tile_q = plan.tile_q;
  p.d_copies = plan.d_copies;
  p.d = static_cast<int>(geometry.d);
  p.value_d = static_cast<int>(geometry.d_v);
  p.d_q_scale = static_cast<float>(geometry.scale);
  p.d_k_scale = static_cast<float>(geometry.scale / core::selection_scale(geometry.scale));
  p.vector_q = flag(problem.q);
  p.vector_k = flag(problem.k);
  p.vector_v = flag(problem.v);
  p.vector_out = flag(args.out);
  p.vector_d_out = flag(args.d_out);
  p.vector_d_q = flag(args.d_q);
  p.vector_d_k = flag(args.d_k);
  p.vector_d_v = flag(args.d_v);
  p.sequences = static_cast<int>(geometry.batch);
  p.kv_heads = tile::Divisor(static_cast<int>(std::max<std::int64_t>(geometry.kv_heads, 1)));
  p.query_tiles = static_cast<int>(plan.query_tiles);
  p.block_tiles = tile::kBlockKeys / plan.keys;
  p.launches = static_cast<int>(plan.launches());
  p.wraps = plan.wraps ? 1 : 0;
  p.prepare_ctas = plan.prepare_ctas;
  p.finish_ctas = plan.finish_ctas;
  return p;
}

// Of launch number `launch`: its key tiles, the last ones first.
void set_launch(BackwardParams& p, const BackwardPlan& plan, int launch) {
  const std::int64_t range = plan.launches() - 1 - launch;
  const std::int64_t first = range * plan.launch_tiles;
  const std::int64_t tiles = std::min(plan.launch_tiles, plan.key_tiles - first);
  const int heads = p.sequences * p.kv_heads.value;
  p.launch = launch;
  p.first_key_tile = static_cast<int>(first);
  p.order = {tile::Divisor(static_cast<int>(tiles)), heads, plan.head_group, plan.last_ascends};
  p.items = static_cast<int>(tiles) * heads;
}

BackwardPlan plan_of(const BackwardKernel& kernel, const Problem& problem) {
  return plan_backward(kernel, problem, device_facts(problem.device.index));
}

}  // namespace

void size_why_not(const BackwardKernel& kernel, const Problem& problem, core::Refusals& refusals) {
  constexpr std::int64_t kMost = std::int64_t{1} << 29;  // key tiles, and query tiles, are counted in 32 bits
  const BackwardPlan plan = plan_of(kernel, problem);
  if (plan.items > kMost) {
    refusals.add([&] {
      return "batch * kv_heads * n_k / " + std::to_string(plan.keys) + ": takes up to " + std::to_string(kMost) +
             ", got " + std::to_string(plan.items);
    });
  }
  const std::int64_t tiles = plan.query_tiles * problem.q.extent(1);
  if (tiles > kMost) {
    refusals.add([&] {
      return "heads * query tiles of " + std::to_string(plan.tile_q) + " rows: takes up to " + std::to_string(kMost) +
             ", got " + std::to_string(tiles);
    });
  }
}

std::size_t fused_workspace(const BackwardKernel& kernel, const BackwardArgs& args) {
  return plan_of(kernel, args.problem).scratch.bytes;
}

std::string describe_plan(const BackwardKernel& kernel, const Problem& problem) {
  return to_string(plan_of(kernel, problem));
}

void fused_backward_launch(const BackwardKernel& kernel,
                           void (*launch_instance)(const BackwardParams&, int ctas, cudaStream_t),
                           const BackwardArgs& args) {
  const CurrentDevice device(args.problem.device.index);
  const auto stream = static_cast<cudaStream_t>(args.run.stream);
  const BackwardPlan plan = plan_of(kernel, args.problem);
  if (args.problem.q.extent(1) == 0 || plan.items + plan.query_tiles == 0) {  // nothing to compute
    const ConstTensorView& k = args.problem.k;
    return launch_clear_keys(blocks::out_of(args.d_k), blocks::out_of(args.d_v), k.extent(0),
                             static_cast<int>(k.extent(1)), static_cast<int>(k.extent(2)), stream);
  }
  BackwardParams params = params_of(kernel, plan, args);
  launch_clear_counters(static_cast<std::uint8_t*>(args.run.workspace) + plan.scratch.counters,
                        plan.scratch.counter_bytes, stream);
  launch_prepare_rows(params, stream);
  for (int launch = 0; plan.ctas > 0 && launch < params.launches; ++launch) {
    set_launch(params, plan, launch);
    if (params.mask_words.data != nullptr) launch_pack_mask(mask_words_of(plan, args, params), stream);
    launch_instance(params, plan.ctas, stream);
  }
  launch_finish_d_q(params, stream);
}

}  // namespace dspattn::cuda::sm90::backward
