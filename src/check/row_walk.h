// A walk over the query rows of a case that has been judged: what both kinds of tolerance look at.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check/case_data.h"
#include "core/geometry.h"
#include "core/half.h"
#include "cpu/reference.h"

namespace dspattn::check {

inline constexpr double kOutOfReach = 1e30;  // a score this far from 0 is its bias, if that is what is extreme

// A rank-4 tensor as doubles.
struct Dense {
  std::int64_t heads = 0, rows = 0, width = 0;
  std::vector<double> data;

  Dense() = default;
  explicit Dense(const Tensor& tensor) {
    const ConstTensorView view = tensor.host_view();
    heads = view.extent(1);
    rows = view.extent(2);
    width = view.extent(3);
    data.reserve(static_cast<std::size_t>(view.elements()));
    for (std::int64_t b = 0; b < view.extent(0); ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t c = 0; c < width; ++c) data.push_back(tensor.at(b, h, i, c));
        }
      }
    }
  }
  std::int64_t offset(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return ((b * heads + h) * rows + i) * width;
  }
  const double* row(std::int64_t b, std::int64_t h, std::int64_t i) const { return data.data() + offset(b, h, i); }
};

// What both kinds of tolerance walk over: one query row and its kept keys. With rest = mean all keys that it sees count
// as kept, and the pruned ones have the mean of V.
struct RowContext {
  std::int64_t row = 0;
  const double* q = nullptr;
  const double* d_out = nullptr;  // null in forward
  std::int64_t q_offset = 0;
  std::int64_t query_terms = 1;  // rows that are summed into a key's gradient
  struct Kept {
    const double* k;
    const double* v;
    std::int64_t k_offset, v_offset;
    double score, magnitude, weight;
    double factor, slope;          // dropout's of the weight, a soft cap's of the score
    std::int64_t bias_offset = 0;  // in the gradient of the bias
    bool pruned = false;
  };
  std::vector<Kept> kept;
  double rest = 0;                         // the weight of the pruned ones
  const double* mean_magnitude = nullptr;  // [d_v], with rest = mean
  std::int64_t head = 0;
  double sink = -std::numeric_limits<double>::infinity();
  double sink_weight = 0;
  double d_lse = 0;
};

// fp16's lowest number as a bias: GPU kernels take sums below -65408 * 2^e for that (docs/fused_kernel.md).
inline constexpr double kLowestBiasedOnGpu = -65408;
inline bool lowest_fp16_on_gpu(const CaseData& data) {
  return data.drawn().lowest_bias && data.drawn().bias_dtype == DType::f16 &&
         data.device_problem().device.type == DeviceType::cuda;
}

class Walk {
 public:
  Walk(const CaseData& data, const cpu::Reference& given)
      : clamps(data.drawn().dtype != DType::f32 &&
               (data.drawn().extreme_bias || data.drawn().extreme_scale || lowest_fp16_on_gpu(data))),
        swallows_(data.drawn().lowest_bias || data.drawn().extreme_bias),
        given_(given),
        host_(data.host_problem()),
        q_(data.q()),
        k_(data.k()),
        v_(data.v()) {
    if (data.d_out().present()) d_out_ = Dense(data.d_out());
    if (data.d_lse().present()) d_lse_ = &data.d_lse();
    cap = host_.soft_cap.value_or(0);
    scale = core::geometry_of(host_).scale;
    d = q_.width;
    d_v = v_.width;
    longest = v_.rows;
  }

  // Calls visit(row) for every row that has a finite LSE: neither empty nor NaN.
  template <typename Visit>
  void each_row(Visit visit) const {
    const std::int64_t group = k_.heads > 0 ? q_.heads / k_.heads : 1;
    for (const cpu::Sequence& seq : cpu::sequences_of(host_)) {
      for (std::int64_t h = 0; h < q_.heads; ++h) {
        for (std::int64_t i = 0; i < seq.n_q; ++i) {
          RowContext context;
          context.row = (seq.batch * q_.heads + h) * q_.rows + seq.q_begin + i;
          if (!std::isfinite(given_.lse[static_cast<std::size_t>(context.row)])) continue;
          context.q = q_.row(seq.batch, h, seq.q_begin + i);
          context.q_offset = q_.offset(seq.batch, h, seq.q_begin + i);
          if (!d_out_.data.empty()) context.d_out = d_out_.row(seq.batch, h, seq.q_begin + i);
          context.query_terms = seq.n_q * group;
          if (mean()) context.mean_magnitude = given_.mean_magnitudes.data() + context.row * d_v;
          context.head = h;
          if (d_lse_ != nullptr) context.d_lse = d_lse_->at(seq.batch, h, seq.q_begin + i);
          if (host_.sinks.present()) context.sink = core::load_element(host_.sinks.data, DType::f32, h);
          const double largest = std::max(context.sink, largest_counted(context.row, seq.n_k));
          context.sink_weight = std::exp(context.sink - largest);
          double sum = context.sink_weight;
          for (std::int64_t j = 0; j < seq.n_k; ++j) {
            if (!counts(context.row, j)) continue;
            const double score = given_.scores.at(context.row, j);
            const bool pruned = !given_.selection.at(context.row, j);
            const double* value =
                pruned ? given_.means.data() + context.row * d_v : v_.row(seq.batch, h / group, seq.k_begin + j);
            context.kept.push_back(
                {k_.row(seq.batch, h / group, seq.k_begin + j), value, k_.offset(seq.batch, h / group, seq.k_begin + j),
                 v_.offset(seq.batch, h / group, seq.k_begin + j), score, given_.magnitudes.at(context.row, j),
                 std::exp(score - largest), given_.factors.at(context.row, j), given_.slopes.at(context.row, j),
                 bias_offset(seq.index, h, i, j), pruned});
            sum += context.kept.back().weight;
          }
          context.sink_weight /= sum;
          for (auto& key : context.kept) {
            key.weight /= sum;
            if (key.pruned) context.rest += key.weight;
          }
          visit(context);
        }
      }
    }
  }

  // Whether a score (or an LSE) is a bias that has swallowed the product: it has the same bits in every precision.
  bool swallowed(double score) const { return swallows_ && std::abs(score) > kOutOfReach; }

  // A scaled product under the soft cap, if there is one.
  double capped(double scaled) const { return cap > 0 ? cap * std::tanh(scaled / cap) : scaled; }

  double cap = 0;       // 0: none
  bool clamps = false;  // scores may be beyond what a 16-bit kernel holds them in
  double scale = 1;
  std::int64_t d = 0, d_v = 0;
  std::int64_t longest = 0;  // keys that a mean may be over

 private:
  bool mean() const { return host_.rest == Rest::mean; }

  // Whether a key has a weight.
  bool counts(std::int64_t row, std::int64_t j) const {
    const bool visible = given_.scores.at(row, j) != -std::numeric_limits<double>::infinity();
    return given_.selection.at(row, j) != 0 || (mean() && visible);
  }

  double largest_counted(std::int64_t row, std::int64_t keys) const {
    double largest = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = 0; j < keys; ++j) {
      if (counts(row, j)) largest = std::max(largest, given_.scores.at(row, j));
    }
    return largest;
  }

  std::int64_t bias_offset(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) const {
    const ConstTensorView& bias = host_.mask.bias;
    const std::int64_t index[4] = {i0, i1, i2, i3};
    std::int64_t place = 0;
    for (int dim = 0; dim < bias.rank; ++dim) {
      place = place * bias.extent(dim) + (bias.extent(dim) == 1 ? 0 : index[dim]);
    }
    return place;
  }

  bool swallows_ = false;
  const Tensor* d_lse_ = nullptr;
  const cpu::Reference& given_;
  const Problem& host_;
  Dense q_, k_, v_, d_out_;
};

}  // namespace dspattn::check
