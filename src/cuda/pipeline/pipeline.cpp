#include "cuda/pipeline/pipeline.h"

#include <array>
#include <cmath>
#include <cstdint>

#include "core/geometry.h"
#include "core/pipeline_check.h"
#include "cuda/device/device.h"
#include "cuda/pipeline/sm80/launch.h"
#include "cuda/pipeline/sm90/launch.h"

namespace dspattn::cuda::pipeline {
namespace {

constexpr std::size_t kWorkspaceAlignment = 256;

bool aligned_to(std::uintptr_t bytes, const void* data, DType dtype, std::initializer_list<std::int64_t> strides) {
  bool aligned = reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
  for (const std::int64_t stride : strides) {
    aligned = aligned && stride * static_cast<std::int64_t>(size_bytes(dtype)) % static_cast<std::int64_t>(bytes) == 0;
  }
  return aligned;
}

// The stride of a dimension that is stepped through; one of extent 1 never is, whatever its stride.
std::int64_t step(const ConstTensorView& view, int dim) { return view.extent(dim) > 1 ? view.step(dim) : 0; }

RowsParams rows_of(const ConstTensorView& view) {
  RowsParams rows;
  rows.data = view.data;
  rows.batch_stride = step(view, 0);
  rows.head_stride = step(view, 1);
  rows.row_stride = step(view, 2);
  rows.extent = static_cast<int>(view.extent(3));
  // A row must also end with a whole chunk: a copy of part of one is no read of 16 bytes that all exist.
  rows.aligned = rows.extent * static_cast<int>(size_bytes(view.dtype)) % kChunkBytes == 0 &&
                 aligned_to(kChunkBytes, view.data, view.dtype, {rows.batch_stride, rows.head_stride, rows.row_stride});
  return rows;
}

MatrixParams matrix_of(const SparseMatrices& matrices) {
  MatrixParams params;
  params.nonzeros = matrices.nonzeros;
  params.metadata = static_cast<std::uint32_t*>(matrices.metadata);
  params.rows = matrices.shape.rows();
  params.places = matrices.shape.places();
  params.metadata_words =
      params.rows * (params.places / places_per_word_column(static_cast<int>(size_bytes(matrices.shape.dtype))));
  return params;
}

// The walk of a matrix that somebody looks at: every block of it.
BlockWalk walk_of(const SparseShape& shape, const BlockMaskView& blocks) {
  BlockWalk walk;
  walk.n_q = shape.n_q;
  walk.n_k = shape.n_k;
  if (shape.block > 0) {
    walk.block = shape.block;
    walk.width = static_cast<int>(shape.width);
    walk.counts = static_cast<const std::int32_t*>(blocks.counts.data);
    walk.columns = static_cast<const std::int32_t*>(blocks.columns.data);
  }
  walk.key_blocks = static_cast<int>((shape.places() + walk.block - 1) / walk.block);
  return walk;
}

void set_key_lengths(BlockWalk& walk, const ConstTensorView& key_lengths) {
  if (!key_lengths.present()) return;
  walk.key_lengths = static_cast<const std::int32_t*>(key_lengths.data);
  walk.key_length_stride = step(key_lengths, 0);
}

void set_mask_strides(std::int64_t (&strides)[4], const ConstTensorView& view) {
  for (int dim = 0; dim < 4; ++dim) strides[dim] = step(view, dim);
}

ElementMask element_mask_of(const Mask& mask) {
  ElementMask params;
  if (mask.allowed.present()) {
    params.allowed = static_cast<const std::uint8_t*>(mask.allowed.data);
    set_mask_strides(params.allowed_stride, mask.allowed);
  }
  if (mask.bias.present()) {
    params.bias = mask.bias.data;
    params.bias_type = mask.bias.dtype;
    set_mask_strides(params.bias_stride, mask.bias);
  }
  return params;
}

int group_log2(Pattern pattern) { return pattern.group == 4 ? 2 : 1; }

// Whose instructions a launch may use.
enum class Code { sm80, sm90 };

// Hopper's where there are any.
Code best_code(const Device& device) { return device_facts(device.index).major == 9 ? Code::sm90 : Code::sm80; }

void run_qk_prune(const QkPruneArgs& args, const BlockWalk& walk, Code code) {
  const SparseShape& shape = args.scores.shape;
  if (shape.nonzeros_bytes() == 0) return;
  QkPruneParams params;
  params.q = rows_of(args.q);
  params.k = rows_of(args.k);
  params.scores = matrix_of(args.scores);
  params.walk = walk;
  params.mask = element_mask_of(args.mask);
  const std::int64_t reach = walk.n_q + walk.n_k;  // no window of this size hides anything
  params.banded = walk.band.left < reach || walk.band.right < reach || walk.key_lengths != nullptr;
  params.heads = static_cast<int>(shape.heads);
  params.heads_per_kv = static_cast<int>(shape.heads / args.k.extent(1));
  params.group_log2 = group_log2(shape.pattern);
  params.interleaved = shape.grouping == Grouping::interleaved;
  const double d = static_cast<double>(args.q.extent(3) > 0 ? args.q.extent(3) : 1);
  const double scale = args.scale.value_or(1.0 / std::sqrt(d));
  // fp32 is compared as it is; beside a bias in a unit in which no finite bias overflows.
  const double unit = args.mask.bias.present() ? std::min(1.0, core::selection_scale(scale)) : 1.0;
  const double key_scale = shape.dtype == DType::f32 ? unit : core::selection_scale(scale);
  params.key_scale = static_cast<float>(key_scale);
  params.value_scale = static_cast<float>(scale / key_scale);
  params.bias_scale = static_cast<float>(1.0 / scale);
  const CurrentDevice current(args.device.index);
  if (code == Code::sm90 && sm90::serves_qk_prune(params, shape.matrices())) {
    return sm90::launch_qk_prune(shape.dtype, params, shape.matrices(), args.run.stream);
  }
  launch_qk_prune(shape.dtype, params, shape.matrices(), args.run.stream);
}

void run_softmax(const SoftmaxArgs& args, const BlockWalk& walk) {
  const SparseShape& shape = args.matrices.shape;
  if (shape.matrices() * shape.rows() == 0) return;
  SoftmaxParams params;
  params.matrix = matrix_of(args.matrices);
  params.walk = walk;
  params.matrices = shape.matrices();
  params.heads = static_cast<int>(shape.heads);
  if (args.lse.present()) {
    params.lse = static_cast<float*>(args.lse.data);
    for (int dim = 0; dim < 3; ++dim) params.lse_stride[dim] = args.lse.step(dim);
  }
  const CurrentDevice current(args.device.index);
  launch_softmax(shape.dtype, params, args.run.stream);
}

void run_pv_sparse(const PvSparseArgs& args, const BlockWalk& walk, Code code) {
  const SparseShape& shape = args.weights.shape;
  if (args.out.elements() == 0) return;
  PvSparseParams params;
  params.weights = matrix_of(args.weights);
  params.v = rows_of(args.v);
  params.walk = walk;
  params.out = args.out.data;
  for (int dim = 0; dim < 3; ++dim) params.out_stride[dim] = args.out.step(dim);
  params.out_aligned =
      aligned_to(8, args.out.data, args.out.dtype, {args.out.step(0), args.out.step(1), args.out.step(2)});
  params.out_fp32 = args.out.dtype == DType::f32;
  params.heads = static_cast<int>(shape.heads);
  params.heads_per_kv = static_cast<int>(shape.heads / args.v.extent(1));
  params.group_log2 = group_log2(shape.pattern);
  params.interleaved = shape.grouping == Grouping::interleaved;
  const CurrentDevice current(args.device.index);
  if (code == Code::sm90 && sm90::serves_pv_sparse(params, shape.matrices())) {
    return sm90::launch_pv_sparse(shape.dtype, params, shape.matrices(), args.run.stream);
  }
  launch_pv_sparse(shape.dtype, params, shape.matrices(), args.run.stream);
}

std::size_t rounded(std::size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

void why_not(const Problem& problem, core::Refusals& refusals) {
  refusals.add_all(core::pipeline_reasons(problem, {}));
  const DeviceFacts& device = device_facts(problem.device.index);
  if (!device.present) {
    refusals.add([&] { return "device: " + device.absence; });
    return;
  }
  constexpr std::int64_t kMaxDim = 256;
  if (const std::int64_t dim = std::max(problem.q.extent(3), problem.v.extent(3)); dim > kMaxDim) {
    refusals.add([&] { return "d, d_v: takes up to " + std::to_string(kMaxDim) + ", got " + std::to_string(dim); });
  }
  // Compiled for 8.0, 8.9 and 9.0; code for 8.0 also runs on 8.6 and 8.7.
  if (device.major < 8 || device.major > 9) {
    refusals.add([&] {
      return "device: expected compute capability 8.0 to 9.0, got " + std::to_string(device.major) + "." +
             std::to_string(device.minor);
    });
  }
}

void why_not_hopper(const Problem& problem, core::Refusals& refusals) {
  why_not(problem, refusals);
  const DeviceFacts& device = device_facts(problem.device.index);
  if (device.present && device.major != 9) {
    refusals.add([&] { return "device: expected compute capability 9.0, got major " + std::to_string(device.major); });
  }
  const auto q = problem.q.rank == 4 ? problem.q.extent(3) : 0, v = problem.v.rank == 4 ? problem.v.extent(3) : 0;
  if (q > 64 && v > 64) {
    refusals.add([&] {
      return "q.shape[3], v.shape[3]: expected one of them at most 64, got " + std::to_string(q) + " and " +
             std::to_string(v);
    });
  }
}

std::size_t workspace_of(const ForwardArgs& args) {
  const SparseShape shape = core::sparse_shape_of(args.problem, {});
  return rounded(shape.nonzeros_bytes()) + rounded(shape.metadata_bytes());
}

// The three chained.
void chain(const ForwardArgs& args, const BlockMaskView& blocks, Code code) {
  const Problem& problem = args.problem;
  SparseMatrices matrices{core::sparse_shape_of(problem, blocks), args.run.workspace, nullptr};
  matrices.metadata = static_cast<std::byte*>(args.run.workspace) + rounded(matrices.shape.nonzeros_bytes());
  BlockWalk walk = walk_of(matrices.shape, blocks);
  walk.band = core::band_of(problem.mask);
  set_key_lengths(walk, problem.mask.key_lengths);
  // Only where the band leaves something out: an unmasked problem lets pv_sparse take more rows per CTA.
  walk.skip_masked = walk.columns == nullptr &&
                     (walk.band.left < walk.n_k || walk.band.right < walk.n_k || walk.key_lengths != nullptr);
  Execution run = args.run;
  run.kernel.clear();
  run_qk_prune({.device = problem.device,
                .q = problem.q,
                .k = problem.k,
                .mask = problem.mask,
                .scale = problem.scale,
                .fp32_products = problem.fp32_products,
                .blocks = blocks,
                .scores = matrices,
                .run = run},
               walk, code);
  run_softmax({.device = problem.device, .matrices = matrices, .blocks = blocks, .lse = args.lse, .run = run}, walk);
  run_pv_sparse({.device = problem.device,
                 .weights = matrices,
                 .v = problem.v,
                 .blocks = blocks,
                 .key_lengths = problem.mask.key_lengths,
                 .fp32_products = problem.fp32_products,
                 .out = args.out,
                 .run = run},
                walk, code);
}

}  // namespace

void launch_qk_prune(DType dtype, QkPruneParams params, std::int64_t matrices, void* stream) {
  switch (dtype) {
    case DType::bf16:
      return launch_qk_prune_bf16(params, matrices, stream);
    case DType::f16:
      return launch_qk_prune_f16(params, matrices, stream);
    default:
      return launch_qk_prune_f32(params, matrices, stream);
  }
}

void launch_pv_sparse(DType dtype, PvSparseParams params, std::int64_t matrices, void* stream) {
  switch (dtype) {
    case DType::bf16:
      return launch_pv_sparse_bf16(params, matrices, stream);
    case DType::f16:
      return launch_pv_sparse_f16(params, matrices, stream);
    default:
      return launch_pv_sparse_f32(params, matrices, stream);
  }
}

void qk_prune(const QkPruneArgs& args) {
  BlockWalk walk = walk_of(args.scores.shape, args.blocks);
  walk.band = core::band_of(args.mask);
  set_key_lengths(walk, args.mask.key_lengths);
  run_qk_prune(args, walk, best_code(args.device));
}

void nonzero_softmax(const SoftmaxArgs& args) { run_softmax(args, walk_of(args.matrices.shape, args.blocks)); }

void pv_sparse(const PvSparseArgs& args) {
  BlockWalk walk = walk_of(args.weights.shape, args.blocks);
  set_key_lengths(walk, args.key_lengths);
  run_pv_sparse(args, walk, best_code(args.device));
}

void run_pipeline(const ForwardArgs& args, const BlockMaskView& blocks) {
  chain(args, blocks, best_code(args.problem.device));
}

std::span<const core::KernelRow> pipeline_rows() {
  static const std::array<core::KernelRow, 2> rows{
      core::KernelRow{
          .info = {"sm90_pipeline", Pass::forward, DeviceType::cuda,
                   "sm80_pipeline with Hopper's own tensor-core instructions where d or d_v is at most 64; compute "
                   "capability 9.0"},
          .why_not = &why_not_hopper,
          .forward_workspace = &workspace_of,
          .forward = [](const ForwardArgs& args) { chain(args, {}, Code::sm90); },
          .features = {core::Feature::fp32_results}},
      core::KernelRow{
          .info = {"sm80_pipeline", Pass::forward, DeviceType::cuda,
                   "three kernels (prune in the GEMM epilogue, softmax on nonzeros, sparse GEMM) for compute "
                   "capability 8.0 to 9.0: 2:4 and 1:2 of bf16 and fp16, 1:2 of fp32 in tf32, d up to 256"},
          .why_not = &why_not,
          .forward_workspace = &workspace_of,
          .forward = [](const ForwardArgs& args) { chain(args, {}, Code::sm80); },
          .features = {core::Feature::fp32_results}}};
  return rows;
}

}  // namespace dspattn::cuda::pipeline
