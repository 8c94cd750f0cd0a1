// Attention with scores pruned to an N:M pattern:
//
//   O = softmax(prune(S)) V,   S = scale * Q K^T + bias,   masked entries = -inf
//
//   #include <dspattn/attention.h>
//   dspattn::ForwardArgs args;
//   args.problem.q = {q, dspattn::DType::f32, {batch, heads, n_q, d}};   // likewise k, v
//   args.problem.pattern = {2, 4};
//   args.out = {out, dspattn::DType::f32, {batch, heads, n_q, d_v}};
//   dspattn::Workspace workspace;                 // workspace.h: memory for the kernel to work in
//   workspace.attach(args);
//   dspattn::forward(args);                       // throws dspattn::Error with every reason
//
// This header knows neither torch nor CUDA: a stream is an opaque handle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "dspattn/error.h"
#include "dspattn/mask.h"
#include "dspattn/pattern.h"
#include "dspattn/tensor_view.h"

namespace dspattn {

inline constexpr std::int64_t kMaxHeadDim = 512;

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
};

// A packed batch: the sequences lie end to end along the n dimension of q (and k, v), which then have a leading batch
// extent of 1. Sequence s is rows cu_q[s] ... cu_q[s+1]-1 of q and cu_k[s] ... cu_k[s+1]-1 of k and v. Groups, masks
// and diagonals count from each sequence's own start; mask tensors are indexed by position within the sequence and have
// extents [batch|1, heads|1, max_q|1, max_k|1] with batch the number of sequences. Rows at and past cu_q[batch]
// (cu_k[batch]) belong to no sequence: they are not read, and their results are those of a row without keys, 0 and an
// LSE of -inf, with gradients of 0.
struct Packed {
  ConstTensorView cu_q;    // int32 [batch+1], starts at 0, never decreases, at most the rows of q at the end
  ConstTensorView cu_k;    // int32 [batch+1]
  std::int64_t max_q = 0;  // longest sequence or any upper bound; needed on the host because cu_q may live on a GPU
  std::int64_t max_k = 0;
};

// What the products of fp32 inputs may run in. CPU kernels always use full fp32.
enum class Fp32Products : std::uint8_t { tf32_allowed, full };

// What becomes of the weight of the pruned keys.
//   drop: it is left out of the softmax
//   mean: the softmax is over all visible keys, and the pruned ones together bring the mean of V over the whole blocks
//         of 128 keys that the row sees (where it sees no whole block: over the keys that it sees). The LSE is then
//         that of all visible scores. For inference: there are no gradients. Not with mask tensors of more than one
//         query row.
enum class Rest : std::uint8_t { drop, mean };

// Whose scores choose the keys.
//   each_head: a query head's own
//   shared:    the query heads that share a key head keep the same keys at each position: those of the largest sums of
//              their weights before pruning
enum class Choice : std::uint8_t { each_head, shared };

// Weights are dropped after pruning, and those that stay divided by 1 - probability; the LSE knows nothing of it.
// Whether a weight is dropped is a function of seed, offset and the weight's place (core/dropout.h): forward and
// backward agree when they are given the same.
struct Dropout {
  double probability = 0;  // 0 to below 1
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  // int32 [4] on the device, low and high words of seed and offset, read in place of the numbers: a CUDA graph then has
  // other numbers at each replay. Optional.
  ConstTensorView state;
};

// What is to be computed, apart from where the result goes. All tensors live on `device`.
struct Problem {
  Device device;
  ConstTensorView q;  // [batch, heads, n_q, d]
  ConstTensorView k;  // [batch, kv_heads, n_k, d]; heads is a multiple of kv_heads
  ConstTensorView v;  // [batch, kv_heads, n_k, d_v]
  Pattern pattern{2, 4};
  Grouping grouping = Grouping::interleaved;
  Mask mask;
  std::optional<double> scale;  // default 1/sqrt(d); finite and positive
  std::optional<Packed> packed;
  Fp32Products fp32_products = Fp32Products::tf32_allowed;
  Rest rest = Rest::drop;
  Choice choice = Choice::each_head;
  Dropout dropout;
  // Scaled scores become cap * tanh(score / cap) before bias and mask. Finite and positive. The choice of keys is by
  // the scores as they were.
  std::optional<double> soft_cap;
  // fp32 [heads]: a logit that every row of the head has in its softmax beside its keys, without a value; the LSE
  // counts it. It is not pruned.
  ConstTensorView sinks;
  // int32 [batch, blocks]: k and v are pages, [pages, kv_heads, page size, d], and key j of sequence b is row
  // j % page size of page block_table[b, j / page size]. Page sizes are multiples of 16; n_k is blocks * page size, and
  // mask.key_lengths says how many of these keys there are. Numbers that are no page count as keys past the length.
  ConstTensorView block_table;
  // fp32 [batch, kv_heads, 2 * blocks, d_v + 1] with n_k / 128 blocks or more: sums of V that the caller keeps
  // (value_sums.h), up to date for every whole block of 128 keys below the lengths. With rest = mean alone; a kernel
  // that takes them reads of V what is kept, others compute the means anew. Optional.
  ConstTensorView value_sums;
};

// Threads of the caller's own, for CPU kernels inside a program that has a pool already: two pools on the same cores
// get in each other's way. `run` calls work(loop) `seats` times, on as many threads at once as it has to give (one
// after another is right too, only slower), and returns when every call has returned. work does not throw.
struct ThreadTeam {
  void (*run)(void* self, int seats, void (*work)(void* loop), void* loop) = nullptr;
  void* self = nullptr;
};

// How it is to be run.
struct Execution {
  std::string kernel;               // force a row of the kernel table by name; empty: the first that fits
  void* stream = nullptr;           // cudaStream_t of a GPU kernel; must be null for a CPU kernel
  int threads = 0;                  // CPU threads; 0: all cores the process may use
  ThreadTeam team;                  // whose threads; by default a pool of the library's own
  void* workspace = nullptr;        // at least *_workspace_bytes() bytes, 256-byte aligned, on the device;
  std::size_t workspace_bytes = 0;  // may be null when that is 0
};

struct ForwardArgs {
  Problem problem;
  TensorView out;  // [batch, heads, n_q, d_v], q's type or fp32: partial results to be merged (merge.h) want fp32
  TensorView lse;  // fp32 [batch, heads, n_q]; optional
  Execution run;
};

struct BackwardArgs {
  Problem problem;
  // Each but lse in q's type or fp32. Of keys that are a part of a longer row's, out and lse are the whole row's: d_q
  // is then the part's share, to be added to the others'.
  ConstTensorView out;    // of the forward
  ConstTensorView lse;    // of the forward
  ConstTensorView d_out;  // [batch, heads, n_q, d_v]
  ConstTensorView d_lse;  // fp32 [batch, heads, n_q]: the gradient through the LSE; optional
  TensorView d_q, d_k, d_v;
  TensorView d_bias;   // of mask.bias, in its shape, fp32 or its type: summed where it is broadcast; optional
  TensorView d_sinks;  // fp32 [heads]; optional
  Execution run;
};

// Validate, choose a kernel, launch. GPU work is enqueued on run.stream and not waited for.
void forward(const ForwardArgs& args);
void backward(const BackwardArgs& args);

namespace core {
struct KernelRow;  // a line of the kernel table
}

// A call that is validated and whose kernel is chosen, once, for callers that ask for its workspace before they run it:
//
//   dspattn::Prepared call(args);                            // throws as forward does
//   void* workspace = allocate(call.workspace_bytes());      // 256-byte aligned, on the device
//   call.run(workspace, call.workspace_bytes());
//
// Views are kept, not what they point to; run may be called again. It throws where lengths that are on the CPU have
// become what would have been refused.
template <typename Args>
class Prepared;

template <>
class Prepared<ForwardArgs> {
 public:
  explicit Prepared(const ForwardArgs& args);
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  void run(void* workspace, std::size_t bytes);

 private:
  ForwardArgs args_;
  const core::KernelRow* row_;
  std::size_t workspace_bytes_;
};

template <>
class Prepared<BackwardArgs> {
 public:
  explicit Prepared(const BackwardArgs& args);
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  void run(void* workspace, std::size_t bytes);

 private:
  BackwardArgs args_;
  const core::KernelRow* row_;
  std::size_t workspace_bytes_;
};

Prepared(const ForwardArgs&)->Prepared<ForwardArgs>;
Prepared(const BackwardArgs&)->Prepared<BackwardArgs>;

// The same without exceptions, for callers that want a status.
Status try_forward(const ForwardArgs& args) noexcept;
Status try_backward(const BackwardArgs& args) noexcept;

// Bytes of workspace the chosen (or forced) kernel needs. Throws as forward/backward do.
std::size_t forward_workspace_bytes(const ForwardArgs& args);
std::size_t backward_workspace_bytes(const BackwardArgs& args);

}  // namespace dspattn
