// The oracle: attention in fp64 with plain loops that follow the contract sentence by sentence and share no logic with
// the fast kernels (not even the maps of pattern.h and geometry.h). It is also the last CPU row of the kernel table.
//
//   selection key of a score   T = q.k + bias/scale; fp32 inputs compare T rounded to 24 bits, 16-bit inputs compare
//                              T * 2^-e rounded to fp16 and clamped to +-65504, 2^-e the largest power of two <= scale
//   choice                     in each group the `keep` largest keys of those not masked; ties keep the lower index
//   choice = shared            the query heads of a key head compare the sums of their weights before pruning instead
//   result                     softmax over the kept scores S = scale * q.k + bias, times V; LSE of the kept scores
//   rest = mean                softmax over all visible scores; the weights of the pruned ones are times the mean of V
//   soft cap                   S = cap * tanh(scale * q.k / cap) + bias; the choice is by the scores without the cap
//   sink                       one more score in the row's softmax and LSE, without a key and a value
//   dropout                    a weight that is dropped is 0, one that is not is divided by 1 - probability; the LSE is
//                              that of all kept scores
//
// A score of -inf is masked, wherever it comes from (with a soft cap: before the cap). A row with a NaN score that is
// not masked, or with a kept score of +inf, has no softmax: its output and LSE are NaN, its dQ is NaN, and so are dK
// and dV of every key that it sees. A row that sees no key gives 0 and -inf, or the sink that it has; a sink of +inf or
// NaN leaves its rows undefined.
#pragma once

#include <cstdint>
#include <vector>

#include "dspattn/attention.h"

namespace dspattn::cpu {

// A value for each (row, key). Rows are those of the tensor lse flattened, [batch, heads, n_q] (of a packed batch
// [1, heads, packed rows]); keys count from the start of the row's own sequence.
template <typename Value>
struct RowMatrix {
  std::int64_t columns = 0;
  std::vector<Value> values;

  RowMatrix() = default;
  RowMatrix(std::int64_t row_count, std::int64_t column_count, Value value)
      : columns(column_count), values(static_cast<std::size_t>(row_count * column_count), value) {}
  Value& at(std::int64_t row, std::int64_t key) { return values[static_cast<std::size_t>(row * columns + key)]; }
  Value at(std::int64_t row, std::int64_t key) const { return values[static_cast<std::size_t>(row * columns + key)]; }
};

using Selection = RowMatrix<std::uint8_t>;  // 1 where the score is kept

// One sequence of the problem: where its rows lie in the tensors.
struct Sequence {
  std::int64_t index = 0;  // of mask tensors and key lengths
  std::int64_t batch = 0;  // leading index of q, k, v (0 in a packed batch)
  std::int64_t q_begin = 0, n_q = 0;
  std::int64_t k_begin = 0, n_k = 0;
};

std::vector<Sequence> sequences_of(const Problem& problem);

// A group in which something visible was dropped. `gap` is the smallest kept selection key less the largest dropped
// one, in the units compared: 0 is a tie, and a small gap a choice that rounding could turn.
struct Choice {
  std::int64_t row = 0;
  std::int64_t group = 0;
  double gap = 0;
};

struct Reference {
  std::vector<double> out;       // [batch, heads, n_q, d_v]; rows of no sequence are 0
  std::vector<double> lse;       // [batch, heads, n_q]
  Selection selection;           // the given one without its masked keys, or the contract's; empty for NaN rows
  std::vector<Choice> choices;   // of the contract's selection, in order of rows and groups
  RowMatrix<double> keys;        // selection keys as compared; masked = -inf
  RowMatrix<double> scores;      // S; masked = -inf
  RowMatrix<double> magnitudes;  // scale * sum |q_c k_c| + |bias|: what rounding errors of S are relative to
  // With rest = mean, [batch, heads, n_q, d_v]: the mean of V that a row's pruned keys bring, and the mean of |V| over
  // the same keys. Zero where a row prunes nothing; empty with rest = drop.
  std::vector<double> means, mean_magnitudes;
  RowMatrix<double> slopes;   // of S over scale * q.k: 1, or what a soft cap makes of it
  RowMatrix<double> factors;  // of the weights: 1, or with dropout 0 and 1 / (1 - probability)
};

struct Gradients {
  std::vector<double> d_q, d_k, d_v;  // in the shapes of q, k, v
  std::vector<double> d_bias;         // in the shape of mask.bias; empty without one
  std::vector<double> d_sinks;        // [heads]; empty without sinks
};

// The problem must be valid. With `given`, exactly those scores that it keeps and the mask allows are kept.
Reference reference_forward(const Problem& problem, const Selection* given = nullptr);

// The results of rows of which the problem's keys are a part; absent where they are all there is.
struct WholeRows {
  ConstTensorView out, lse;
};

// Gradients of sum(d_out * O) + sum(d_lse * LSE) with the selection held fixed; d_lse may be absent.
Gradients reference_backward(const Problem& problem, const ConstTensorView& d_out, const Selection* given = nullptr,
                             const ConstTensorView& d_lse = {}, const WholeRows& whole = {});

// The kernel-table rows. Memory grows with n_k, not with n_q * n_k.
void reference_forward_kernel(const ForwardArgs& args);
void reference_backward_kernel(const BackwardArgs& args);

}  // namespace dspattn::cpu
