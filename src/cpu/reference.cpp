#include "cpu/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/half.h"
#include "cpu/float_environment.h"
#include "cpu/oracle.h"

namespace dspattn::cpu {
namespace {

using plain::bias_index;
using plain::element;
using plain::int_element;
using plain::kInfinity;
using plain::kNaN;
using plain::Oracle;
using plain::Row;
using plain::Values;

// Gradients of one row, added to those of the whole problem, f_j being dropout's factors:
//   dV_j += f_j w_j dO,   dS_j = w_j (f_j dO.V_j - dO.O + dLSE),   dbias_j += dS_j,   dsink += w_sink (dLSE - dO.O)
//   dQ += scale slope_j dS_j K_j,   dK_j += scale slope_j dS_j Q
// A NaN row has no weights: NaN is added to its own dQ, to its sink's gradient, and to dK, dV and dbias of every key
// that it sees.
void add_row_gradients(Gradients& gradients, const Oracle& oracle, const ConstTensorView& bias, const Sequence& seq,
                       std::int64_t head, std::int64_t i, const Row& row, const double* d_out, double d_lse) {
  const std::int64_t d = oracle.q().width;
  const std::int64_t d_v = oracle.v().width;
  const bool undefined = std::isnan(row.lse);
  double delta = -d_lse;
  for (std::int64_t c = 0; c < d_v; ++c) delta += d_out[c] * row.out[static_cast<std::size_t>(c)];
  if (!gradients.d_sinks.empty()) {
    gradients.d_sinks[static_cast<std::size_t>(head)] -= undefined ? kNaN : row.sink_weight * delta;
  }
  const double* query = oracle.q().row(seq.batch, head, seq.q_begin + i);
  double* d_query = gradients.d_q.data() + oracle.q().offset(seq.batch, head, seq.q_begin + i);
  if (undefined) std::fill_n(d_query, d, kNaN);
  for (std::int64_t j = 0; j < seq.n_k; ++j) {
    const auto at = static_cast<std::size_t>(j);
    const bool seen = row.scores[at] != -kInfinity;
    if (undefined ? !seen : !row.kept[at]) continue;
    const std::int64_t key_head = oracle.key_head(head);
    const double weight = undefined ? kNaN : row.weights[at];
    const double factor = row.factors[at];
    const double* key = oracle.k().row(seq.batch, key_head, seq.k_begin + j);
    const double* value = oracle.v().row(seq.batch, key_head, seq.k_begin + j);
    double* d_key = gradients.d_k.data() + oracle.k().offset(seq.batch, key_head, seq.k_begin + j);
    double* d_value = gradients.d_v.data() + oracle.v().offset(seq.batch, key_head, seq.k_begin + j);
    double d_weight = 0;
    for (std::int64_t c = 0; c < d_v; ++c) {
      d_weight += factor * d_out[c] * value[c];
      d_value[c] += factor * weight * d_out[c];
    }
    const double d_score = weight * (d_weight - delta);
    if (bias.present()) gradients.d_bias[bias_index(bias, seq.index, head, i, j)] += d_score;
    const double d_product = oracle.scale() * row.slopes[at] * d_score;
    for (std::int64_t c = 0; c < d; ++c) {
      d_query[c] += d_product * key[c];
      d_key[c] += d_product * query[c];
    }
  }
}

// A row's weights and output as the whole row has them, of which its keys may be a part: its LSE is then another one
// than fp32's rounding makes of the part's. (Where it is the same the row's own numbers are more precise.)
void take_whole(const WholeRows& whole, std::int64_t batch, std::int64_t head, std::int64_t i, Row& row) {
  if (!whole.lse.present()) return;
  const double lse = element(whole.lse, batch, head, i, 0);
  const double rounding = 0x1p-20 * std::max(1.0, std::abs(row.lse));
  if (std::isnan(row.lse) || row.lse == -kInfinity || std::abs(lse - row.lse) <= rounding) return;
  if (std::isnan(lse)) {
    row.lse = lse;
    return;
  }
  if (std::abs(lse) >= std::numeric_limits<float>::max())
    return;  // fp32 does not hold it: nothing is known of the rest
  for (double& weight : row.weights) weight *= std::exp(row.lse - lse);
  row.sink_weight *= std::exp(row.lse - lse);
  for (std::size_t c = 0; c < row.out.size(); ++c) {
    row.out[c] = element(whole.out, batch, head, i, static_cast<std::int64_t>(c));
  }
}

void store_row(const TensorView& view, std::int64_t batch, std::int64_t head, std::int64_t i, const double* values) {
  for (std::int64_t c = 0; c < view.extent(3); ++c) {
    core::store_element(view.data, view.dtype, batch * view.step(0) + head * view.step(1) + i * view.step(2) + c,
                        values[c]);
  }
}

}  // namespace

std::vector<Sequence> sequences_of(const Problem& problem) {
  std::vector<Sequence> sequences;
  if (!problem.packed) {
    for (std::int64_t b = 0; b < problem.q.extent(0); ++b) {
      sequences.push_back({b, b, 0, problem.q.extent(2), 0, problem.k.extent(2)});
    }
    return sequences;
  }
  const Packed& packed = *problem.packed;
  for (std::int64_t s = 0; s + 1 < packed.cu_q.extent(0); ++s) {
    const std::int64_t q_begin = int_element(packed.cu_q, s);
    const std::int64_t k_begin = int_element(packed.cu_k, s);
    sequences.push_back(
        {s, 0, q_begin, int_element(packed.cu_q, s + 1) - q_begin, k_begin, int_element(packed.cu_k, s + 1) - k_begin});
  }
  return sequences;
}

Reference reference_forward(const Problem& problem, const Selection* given) {
  const Oracle oracle(problem);
  const std::vector<Sequence> sequences = sequences_of(problem);
  std::int64_t longest = 0;
  for (const Sequence& seq : sequences) longest = std::max(longest, seq.n_k);
  const std::int64_t rows = problem.q.extent(0) * problem.q.extent(1) * problem.q.extent(2);

  Reference result;
  result.out.assign(static_cast<std::size_t>(rows * oracle.v().width), 0.0);
  result.lse.assign(static_cast<std::size_t>(rows), -kInfinity);
  result.selection = Selection(rows, longest, 0);
  result.keys = RowMatrix<double>(rows, longest, -kInfinity);
  result.scores = result.keys;
  result.magnitudes = RowMatrix<double>(rows, longest, 0.0);
  if (problem.rest == Rest::mean) result.means.assign(result.out.size(), 0.0);
  result.mean_magnitudes = result.means;
  result.slopes = RowMatrix<double>(rows, longest, 1.0);
  result.factors = result.slopes;
  for (const Sequence& seq : sequences) {
    for (std::int64_t head = 0; head < oracle.q().heads; ++head) {
      for (std::int64_t i = 0; i < seq.n_q; ++i) {
        const Row row = oracle.row(seq, head, i, given);
        const std::int64_t index = oracle.row_index(seq, head, i);
        std::copy(row.out.begin(), row.out.end(), result.out.begin() + index * oracle.v().width);
        result.lse[static_cast<std::size_t>(index)] = row.lse;
        result.choices.insert(result.choices.end(), row.choices.begin(), row.choices.end());
        std::copy(row.kept.begin(), row.kept.end(), result.selection.values.begin() + index * longest);
        std::copy(row.keys.begin(), row.keys.end(), result.keys.values.begin() + index * longest);
        std::copy(row.scores.begin(), row.scores.end(), result.scores.values.begin() + index * longest);
        std::copy(row.magnitudes.begin(), row.magnitudes.end(), result.magnitudes.values.begin() + index * longest);
        if (!row.mean.empty()) {  // there are none to copy to otherwise
          std::copy(row.mean.begin(), row.mean.end(), result.means.begin() + index * oracle.v().width);
          std::copy(row.mean_magnitude.begin(), row.mean_magnitude.end(),
                    result.mean_magnitudes.begin() + index * oracle.v().width);
        }
        std::copy(row.slopes.begin(), row.slopes.end(), result.slopes.values.begin() + index * longest);
        std::copy(row.factors.begin(), row.factors.end(), result.factors.values.begin() + index * longest);
      }
    }
  }
  return result;
}

Gradients reference_backward(const Problem& problem, const ConstTensorView& d_out, const Selection* given,
                             const ConstTensorView& d_lse, const WholeRows& whole) {
  const Oracle oracle(problem);
  const Values d_out_values(d_out);
  const ConstTensorView& bias = problem.mask.bias;
  Gradients gradients{std::vector<double>(oracle.q().data.size(), 0.0),
                      std::vector<double>(oracle.k().data.size(), 0.0),
                      std::vector<double>(oracle.v().data.size(), 0.0),
                      std::vector<double>(bias.present() ? static_cast<std::size_t>(bias.elements()) : 0, 0.0),
                      std::vector<double>(static_cast<std::size_t>(problem.sinks.extent(0)), 0.0)};
  for (const Sequence& seq : sequences_of(problem)) {
    for (std::int64_t head = 0; head < oracle.q().heads; ++head) {
      for (std::int64_t i = 0; i < seq.n_q; ++i) {
        Row row = oracle.row(seq, head, i, given);
        const std::int64_t at = seq.q_begin + i;
        take_whole(whole, seq.batch, head, at, row);
        add_row_gradients(gradients, oracle, bias, seq, head, i, row, d_out_values.row(seq.batch, head, at),
                          d_lse.present() ? element(d_lse, seq.batch, head, at, 0) : 0.0);
      }
    }
  }
  return gradients;
}

void reference_forward_kernel(const ForwardArgs& args) {
  const DefaultFloatEnvironment environment;
  const Oracle oracle(args.problem);
  // Every row is that of one without keys until it is found to have some: rows past the last sequence have none.
  const std::vector<double> zeros(static_cast<std::size_t>(oracle.v().width), 0.0);
  for (std::int64_t batch = 0; batch < args.out.extent(0); ++batch) {
    for (std::int64_t head = 0; head < args.out.extent(1); ++head) {
      for (std::int64_t i = 0; i < args.out.extent(2); ++i) {
        store_row(args.out, batch, head, i, zeros.data());
        if (!args.lse.present()) continue;
        core::store_element(args.lse.data, DType::f32,
                            batch * args.lse.step(0) + head * args.lse.step(1) + i * args.lse.step(2), -kInfinity);
      }
    }
  }
  for (const Sequence& seq : sequences_of(args.problem)) {
    for (std::int64_t head = 0; head < oracle.q().heads; ++head) {
      for (std::int64_t i = 0; i < seq.n_q; ++i) {
        const Row row = oracle.row(seq, head, i, nullptr);
        store_row(args.out, seq.batch, head, seq.q_begin + i, row.out.data());
        if (!args.lse.present()) continue;
        // Beyond fp32 it is the largest number: only a row without a key has an infinite LSE.
        constexpr double kLargest = std::numeric_limits<float>::max();
        const double lse = std::isinf(row.lse) ? row.lse : std::clamp(row.lse, -kLargest, kLargest);
        core::store_element(
            args.lse.data, DType::f32,
            seq.batch * args.lse.step(0) + head * args.lse.step(1) + (seq.q_begin + i) * args.lse.step(2), lse);
      }
    }
  }
}

void reference_backward_kernel(const BackwardArgs& args) {
  const DefaultFloatEnvironment environment;
  const Gradients gradients = reference_backward(args.problem, args.d_out, nullptr, args.d_lse, {args.out, args.lse});
  const auto store = [](const TensorView& view, const std::vector<double>& values) {
    for (std::int64_t batch = 0; batch < view.extent(0); ++batch) {
      for (std::int64_t head = 0; head < view.extent(1); ++head) {
        for (std::int64_t i = 0; i < view.extent(2); ++i) {
          const std::int64_t row = (batch * view.extent(1) + head) * view.extent(2) + i;
          store_row(view, batch, head, i, values.data() + row * view.extent(3));
        }
      }
    }
  };
  store(args.d_q, gradients.d_q);
  store(args.d_k, gradients.d_k);
  store(args.d_v, gradients.d_v);
  if (args.d_bias.present()) store(args.d_bias, gradients.d_bias);
  for (std::int64_t head = 0; head < args.d_sinks.extent(0); ++head) {
    core::store_element(args.d_sinks.data, DType::f32, head * args.d_sinks.step(0),
                        gradients.d_sinks[static_cast<std::size_t>(head)]);
  }
}

}  // namespace dspattn::cpu
