// The paper's own system: attention as three functions over a sparse score matrix that lives in memory.
//
//   qk_prune         S = scale * Q K^T + bias, masked, pruned to N:M where it is computed: nonzeros and metadata
//   nonzero_softmax  softmax over the nonzeros of each row, in place
//   pv_sparse        O = A V, on sparse tensor cores where the device has them
//
// and pipeline_forward, which chains them. With a block mask (block_mask.h) only the blocks it keeps are computed,
// stored and read. The same functions run on the CPU and on GPUs from sm_80 on; patterns are 2:4 and 1:2 for 16-bit
// types and 1:2 for fp32. This header knows neither torch nor CUDA: a stream is an opaque handle.
//
//   dspattn::SparseShape shape{dspattn::DType::bf16, {2, 4}, dspattn::Grouping::consecutive, batch, heads, n_q, n_k};
//   dspattn::SparseMatrices scores{shape, allocate(shape.nonzeros_bytes()), allocate(shape.metadata_bytes())};
//   dspattn::qk_prune({.device = device, .q = q, .k = k, .scores = scores});
//   dspattn::nonzero_softmax({.device = device, .matrices = scores});
//   dspattn::pv_sparse({.device = device, .weights = scores, .v = v, .out = out});
//
// Every function validates first and throws dspattn::Error with all reasons; GPU work is enqueued on run.stream and not
// waited for. None of the three needs a workspace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "dspattn/attention.h"
#include "dspattn/block_mask.h"

namespace dspattn {

// One sparse matrix per (batch, head), each of rows() x places() with half of the places stored. A place is a column:
// group-major, place = group * group_size + element, so that with consecutive grouping it is the key itself. With a
// block mask, slot s of a block row holds its s-th block: places s * block ... s * block + block-1; slots past the
// row's count are neither written nor read. Padding rows and keys are stored as masked.
struct SparseShape {
  DType dtype = DType::bf16;
  Pattern pattern{2, 4};
  Grouping grouping = Grouping::consecutive;
  std::int64_t batch = 0, heads = 0, n_q = 0, n_k = 0;
  int block = 0;           // of the block mask; 0: none
  std::int64_t width = 0;  // slots per block row

  std::int64_t rows() const;              // n_q rounded up to 32
  std::int64_t places() const;            // n_k (or width * block) rounded up to whole 4-byte metadata words
  std::int64_t nonzeros_per_row() const;  // places() / 2
  // These throw Error where the number does not fit in 63 bits.
  std::int64_t matrices() const;       // batch * heads
  std::size_t nonzeros_bytes() const;  // [batch, heads, rows, nonzeros_per_row] of dtype, contiguous
  std::size_t metadata_bytes() const;  // [batch, heads] times 2-byte blocks in the encoding of docs/layouts.md
};

// Memory for them, the caller's; both pointers aligned to 16 bytes.
struct SparseMatrices {
  SparseShape shape{};
  void* nonzeros = nullptr;
  void* metadata = nullptr;
};

struct QkPruneArgs {
  Device device{};
  ConstTensorView q{};  // [batch, heads, n_q, d]
  ConstTensorView k{};  // [batch, kv_heads, n_k, d]
  Mask mask{};
  std::optional<double> scale{};  // default 1/sqrt(d)
  Fp32Products fp32_products = Fp32Products::tf32_allowed;
  BlockMaskView blocks{};   // absent: every block
  SparseMatrices scores{};  // written: scaled scores in q's type, -inf where masked
  Execution run{};
};

struct SoftmaxArgs {
  Device device{};
  SparseMatrices matrices{};  // scores in, weights out; the metadata is not looked at and may be null
  BlockMaskView blocks{};
  TensorView lse{};  // fp32 [batch, heads, n_q]; optional
  Execution run{};
};

struct PvSparseArgs {
  Device device{};
  SparseMatrices weights{};
  ConstTensorView v{};  // [batch, kv_heads, n_k, d_v]
  BlockMaskView blocks{};
  ConstTensorView key_lengths{};  // int32 [batch], optional: rows of v from the length on are not read
  Fp32Products fp32_products = Fp32Products::tf32_allowed;
  TensorView out{};  // [batch, heads, n_q, d_v]
  Execution run{};
};

void qk_prune(const QkPruneArgs& args);
void nonzero_softmax(const SoftmaxArgs& args);
void pv_sparse(const PvSparseArgs& args);

// The three in a row; what the kernel-table row "sm80_pipeline" runs. The sparse matrix lives in the workspace. Blocks
// of keys that a causal mask, a window or a key length masks for all their queries are left out of all three.
void pipeline_forward(const ForwardArgs& args, const BlockMaskView& blocks = {});
std::size_t pipeline_workspace_bytes(const ForwardArgs& args, const BlockMaskView& blocks = {});

}  // namespace dspattn
