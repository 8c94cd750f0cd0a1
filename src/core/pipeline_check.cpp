#include "core/pipeline_check.h"

#include <cstdint>
#include <utility>

#include "core/geometry.h"
#include "core/tensor_checks.h"
#include "core/validate.h"

namespace dspattn::core {
namespace {

constexpr std::uintptr_t kSparseAlignment = 16;             // nonzeros and metadata are moved 16 bytes at a time
constexpr std::int64_t kMaxLength = std::int64_t{1} << 30;  // rows and keys are counted in 32 bits inside the kernels

void check_pattern(Report& report, const std::string& argument, Pattern pattern, DType dtype) {
  const bool half = dtype == DType::f16 || dtype == DType::bf16;
  if (half ? pattern == Pattern{2, 4} || pattern == Pattern{1, 2} : pattern == Pattern{1, 2}) return;
  report.add(argument, half ? "2:4 or 1:2 for " + std::string(name(dtype)) : std::string("1:2 for fp32"),
             to_string(pattern));
}

void check_blocks(Report& report, const BlockMaskView& blocks, std::int64_t n_q, std::int64_t n_k, Grouping grouping,
                  const Device& device) {
  if (!blocks.present()) return;
  if (blocks.block != 64 && blocks.block != 128) {
    report.add("blocks.block", "64 or 128", std::to_string(blocks.block));
    return;
  }
  if (grouping == Grouping::interleaved && blocks.block != kInterleaveBlock) {
    report.add("blocks.block", "128 for interleaved grouping, whose groups span 128 keys",
               std::to_string(blocks.block));
  }
  const std::int64_t rows = (n_q + blocks.block - 1) / blocks.block;
  const std::int64_t columns = (n_k + blocks.block - 1) / blocks.block;
  const bool counts_ok = check_input(report, "blocks.counts", blocks.counts, "[block_rows]", 1, Inner::contiguous);
  const bool columns_ok =
      check_input(report, "blocks.columns", blocks.columns, "[block_rows, width]", 2, Inner::contiguous);
  for (const auto& [argument, view] :
       {std::pair{"blocks.counts", &blocks.counts}, std::pair{"blocks.columns", &blocks.columns}}) {
    if (view->dtype != DType::i32)
      report.add(std::string(argument) + ".dtype", "int32", std::string(name(view->dtype)));
    if (view->rank > 0 && view->extent(0) != rows) {
      report.add(std::string(argument) + ".shape[0]", "block rows = " + std::to_string(rows),
                 std::to_string(view->extent(0)));
    }
  }
  if (!counts_ok || !columns_ok || blocks.columns.dtype != DType::i32 || blocks.counts.dtype != DType::i32) return;
  if (blocks.columns.extent(0) > 1 && blocks.columns.step(0) != blocks.width()) {
    report.add("blocks.columns", "contiguous rows", stride_text(blocks.columns));
  }
  if (!report.reasons.empty() || device.type != DeviceType::cpu) return;
  const auto* counts = static_cast<const std::int32_t*>(blocks.counts.data);
  const auto* listed = static_cast<const std::int32_t*>(blocks.columns.data);
  for (std::int64_t row = 0; row < rows; ++row) {
    if (counts[row] < 0 || counts[row] > blocks.width()) {
      report.add("blocks.counts[" + std::to_string(row) + "]", "from 0 to width = " + std::to_string(blocks.width()),
                 std::to_string(counts[row]));
      return;
    }
    for (std::int64_t slot = 0; slot < counts[row]; ++slot) {
      const std::int32_t column = listed[row * blocks.width() + slot];
      const std::int32_t least = slot > 0 ? listed[row * blocks.width() + slot - 1] + 1 : 0;
      if (column < least || column >= columns) {
        report.add("blocks.columns[" + std::to_string(row) + "][" + std::to_string(slot) + "]",
                   "ascending block columns below " + std::to_string(columns), std::to_string(column));
        return;
      }
    }
  }
}

enum class Parts { nonzeros, nonzeros_and_metadata };

void check_matrices(Report& report, const std::string& argument, const SparseMatrices& matrices,
                    const BlockMaskView& blocks, const Device& device, Parts parts = Parts::nonzeros_and_metadata) {
  const SparseShape& shape = matrices.shape;
  const std::string prefix = argument + ".shape.";
  if (!is_floating(shape.dtype)) {
    report.add(prefix + "dtype", "fp32, fp16 or bf16", std::string(name(shape.dtype)));
    return;
  }
  check_pattern(report, prefix + "pattern", shape.pattern, shape.dtype);
  for (const auto& [extent, value] : {std::pair{"batch", shape.batch}, std::pair{"heads", shape.heads}}) {
    if (value < 0) report.add(prefix + extent, ">= 0", std::to_string(value));
  }
  for (const auto& [extent, value] : {std::pair{"n_q", shape.n_q}, std::pair{"n_k", shape.n_k}}) {
    if (value < 0 || value > kMaxLength) {
      report.add(prefix + extent, "from 0 to " + std::to_string(kMaxLength), std::to_string(value));
    }
  }
  if (shape.block != blocks.block || shape.width != blocks.width()) {
    report.add(prefix + "block and width",
               "the block mask's " + std::to_string(blocks.block) + " and " + std::to_string(blocks.width()),
               std::to_string(shape.block) + " and " + std::to_string(shape.width));
  }
  if (!report.reasons.empty()) return;
  check_blocks(report, blocks, shape.n_q, shape.n_k, shape.grouping, device);
  try {
    if (shape.nonzeros_bytes() == 0) return;
  } catch (const Error& error) {
    report.reasons.push_back(argument + "." + error.what());
    return;
  }
  const auto check_memory = [&](const char* part, const void* pointer) {
    if (pointer == nullptr || reinterpret_cast<std::uintptr_t>(pointer) % kSparseAlignment != 0) {
      report.add(argument + part, "memory aligned to 16 bytes", pointer == nullptr ? "null" : hex(pointer));
    }
  };
  check_memory(".nonzeros", matrices.nonzeros);
  if (parts == Parts::nonzeros_and_metadata) check_memory(".metadata", matrices.metadata);
}

void check_run(Report& report, const Device& device, const Execution& run) {
  if (device.type == DeviceType::cpu && run.stream != nullptr) {
    report.add("stream", "null for CPU tensors", hex(run.stream));
  }
  if (run.threads < 0) report.add("threads", ">= 0", std::to_string(run.threads));
  if (!run.kernel.empty()) {
    report.add("kernel", "empty: each of the three functions has one kernel per device", "\"" + run.kernel + "\"");
  }
}

void check_products(Report& report, const Device& device, DType dtype, Fp32Products products) {
  if (device.type == DeviceType::cuda && dtype == DType::f32 && products == Fp32Products::full) {
    report.add("fp32_products", "tf32_allowed on a GPU: sparse tensor cores multiply tf32", "full");
  }
}

// The memory of the matrices as views, for overlap checks.
std::pair<ConstTensorView, ConstTensorView> memory_of(const SparseMatrices& matrices) {
  const auto bytes = [](const void* data, std::size_t count) {
    return ConstTensorView(data, DType::b8, {static_cast<std::int64_t>(count)});
  };
  return {bytes(matrices.nonzeros, matrices.shape.nonzeros_bytes()),
          bytes(matrices.metadata, matrices.shape.metadata_bytes())};
}

// Values on the CPU, which can be read.
void check_lengths(Report& report, const std::string& argument, const ConstTensorView& lengths, std::int64_t n_k) {
  for (std::int64_t i = 0; i < lengths.extent(0); ++i) {
    const auto length = static_cast<const std::int32_t*>(lengths.data)[i * lengths.step(0)];
    if (length >= 0 && length <= n_k) continue;
    report.add(argument + "[" + std::to_string(i) + "]", "a length from 0 to n_k = " + std::to_string(n_k),
               std::to_string(length));
    return;
  }
}

void check_extent(Report& report, const std::string& argument, std::int64_t given_extent, const std::string& what,
                  std::int64_t expected) {
  if (given_extent != expected) {
    report.add(argument, what + " = " + std::to_string(expected), std::to_string(given_extent));
  }
}

}  // namespace

std::vector<std::string> qk_prune_reasons(const QkPruneArgs& args) {
  const SparseShape& shape = args.scores.shape;
  Problem problem;
  problem.device = args.device;
  problem.q = args.q;
  problem.k = args.k;
  problem.v = args.k;  // the product with V comes later; k has the shape that v may have
  problem.pattern = shape.pattern;
  problem.grouping = shape.grouping;
  problem.mask = args.mask;
  problem.scale = args.scale;
  Report report{problem_reasons(problem)};
  check_run(report, args.device, args.run);
  check_products(report, args.device, shape.dtype, args.fp32_products);
  check_matrices(report, "scores", args.scores, args.blocks, args.device);
  if (!report.reasons.empty()) return report.reasons;
  if (shape.dtype != args.q.dtype) {
    report.add("scores.shape.dtype", "q's type " + std::string(name(args.q.dtype)), std::string(name(shape.dtype)));
  }
  check_extent(report, "scores.shape.batch", shape.batch, "q's batch", args.q.extent(0));
  check_extent(report, "scores.shape.heads", shape.heads, "q's heads", args.q.extent(1));
  check_extent(report, "scores.shape.n_q", shape.n_q, "q's n_q", args.q.extent(2));
  check_extent(report, "scores.shape.n_k", shape.n_k, "k's n_k", args.k.extent(2));
  if (!report.reasons.empty()) return report.reasons;
  const auto [nonzeros, metadata] = memory_of(args.scores);
  for (const auto& [argument, view] : {std::pair{"q", &args.q}, std::pair{"k", &args.k}}) {
    check_apart(report, "scores.nonzeros", nonzeros, argument, *view);
    check_apart(report, "scores.metadata", metadata, argument, *view);
  }
  check_apart(report, "scores.nonzeros", nonzeros, "scores.metadata", metadata);
  return report.reasons;
}

std::vector<std::string> softmax_reasons(const SoftmaxArgs& args) {
  const SparseShape& shape = args.matrices.shape;
  Report report;
  check_run(report, args.device, args.run);
  check_matrices(report, "matrices", args.matrices, args.blocks, args.device, Parts::nonzeros);
  if (!given(args.lse)) return report.reasons;
  if (check_output(report, "lse", args.lse, "[batch, heads, n_q]", 3, Inner::any)) {
    check_extent(report, "lse.shape[0]", args.lse.extent(0), "batch", shape.batch);
    check_extent(report, "lse.shape[1]", args.lse.extent(1), "heads", shape.heads);
    check_extent(report, "lse.shape[2]", args.lse.extent(2), "n_q", shape.n_q);
  }
  if (args.lse.dtype != DType::f32) report.add("lse.dtype", "fp32", std::string(name(args.lse.dtype)));
  if (report.reasons.empty()) check_apart(report, "lse", args.lse, "matrices.nonzeros", memory_of(args.matrices).first);
  return report.reasons;
}

std::vector<std::string> pv_sparse_reasons(const PvSparseArgs& args) {
  const SparseShape& shape = args.weights.shape;
  Report report;
  check_run(report, args.device, args.run);
  check_products(report, args.device, shape.dtype, args.fp32_products);
  check_matrices(report, "weights", args.weights, args.blocks, args.device);
  const bool v_ok = check_input(report, "v", args.v, "[batch, kv_heads, n_k, d_v]", 4, Inner::contiguous);
  const bool out_ok = check_output(report, "out", args.out, "[batch, heads, n_q, d_v]", 4, Inner::contiguous);
  for (const auto& [argument, dtype] : {std::pair{"v.dtype", args.v.dtype}, std::pair{"out.dtype", args.out.dtype}}) {
    if (dtype != shape.dtype) {
      report.add(argument, "the weights' type " + std::string(name(shape.dtype)), std::string(name(dtype)));
    }
  }
  if (given(args.key_lengths)) {
    if (check_input(report, "key_lengths", args.key_lengths, "[batch]", 1, Inner::any)) {
      check_extent(report, "key_lengths.shape[0]", args.key_lengths.extent(0), "batch", shape.batch);
    }
    if (args.key_lengths.dtype != DType::i32) {
      report.add("key_lengths.dtype", "int32", std::string(name(args.key_lengths.dtype)));
    }
    if (report.reasons.empty() && args.device.type == DeviceType::cpu) {
      check_lengths(report, "key_lengths", args.key_lengths, shape.n_k);
    }
  }
  if (!v_ok || !out_ok) return report.reasons;
  check_extent(report, "v.shape[0]", args.v.extent(0), "batch", shape.batch);
  check_extent(report, "v.shape[2]", args.v.extent(2), "n_k", shape.n_k);
  check_extent(report, "out.shape[0]", args.out.extent(0), "batch", shape.batch);
  check_extent(report, "out.shape[1]", args.out.extent(1), "heads", shape.heads);
  check_extent(report, "out.shape[2]", args.out.extent(2), "n_q", shape.n_q);
  check_extent(report, "out.shape[3]", args.out.extent(3), "v's d_v", args.v.extent(3));
  const std::int64_t kv_heads = args.v.extent(1);
  if (kv_heads == 0 ? shape.heads != 0 : shape.heads % kv_heads != 0) {
    report.add("v.shape[1]", "kv_heads that divide heads = " + std::to_string(shape.heads), std::to_string(kv_heads));
  }
  constexpr std::int64_t kMaxValueDim = 256;  // that the third kernel of the pipeline takes
  if (args.v.extent(3) > kMaxValueDim) {
    report.add("v.shape[3]", "at most " + std::to_string(kMaxValueDim), std::to_string(args.v.extent(3)));
  }
  if (!report.reasons.empty()) return report.reasons;
  const auto [nonzeros, metadata] = memory_of(args.weights);
  check_apart(report, "out", args.out, "v", args.v);
  check_apart(report, "out", args.out, "weights.nonzeros", nonzeros);
  check_apart(report, "out", args.out, "weights.metadata", metadata);
  return report.reasons;
}

std::vector<std::string> pipeline_reasons(const Problem& problem, const BlockMaskView& blocks) {
  Report report;
  if (problem.packed) report.add("packed", "one sequence per batch entry", "a packed batch");
  check_pattern(report, "pattern", problem.pattern, problem.q.dtype);
  check_products(report, problem.device, problem.q.dtype, problem.fp32_products);
  const Geometry geometry = geometry_of(problem);
  for (const auto& [argument, length] : {std::pair{"n_q", geometry.n_q}, std::pair{"n_k", geometry.n_k}}) {
    if (length > kMaxLength) report.add(argument, "at most " + std::to_string(kMaxLength), std::to_string(length));
  }
  check_blocks(report, blocks, geometry.n_q, geometry.n_k, problem.grouping, problem.device);
  return report.reasons;
}

SparseShape sparse_shape_of(const Problem& problem, const BlockMaskView& blocks) {
  const Geometry geometry = geometry_of(problem);
  SparseShape shape;
  shape.dtype = problem.q.dtype;
  shape.pattern = problem.pattern;
  shape.grouping = problem.grouping;
  shape.batch = geometry.batch;
  shape.heads = geometry.heads;
  shape.n_q = geometry.n_q;
  shape.n_k = geometry.n_k;
  shape.block = blocks.block;
  shape.width = blocks.width();
  return shape;
}

}  // namespace dspattn::core
