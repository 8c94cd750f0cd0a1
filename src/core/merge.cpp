#include "dspattn/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/half.h"
#include "core/tensor_checks.h"

namespace dspattn {
namespace {

using core::Inner;
using core::Report;

constexpr const char* kOutLayout = "[batch, heads, n_q, d_v]";
constexpr const char* kLseLayout = "[batch, heads, n_q]";

bool same_extents(const ConstTensorView& view, const ConstTensorView& like) {
  for (int dim = 0; dim < view.rank; ++dim) {
    if (view.extent(dim) != like.extent(dim)) return false;
  }
  return true;
}

// Elements of one that are the other's, each in the same place: read before they are written.
bool same_memory(const ConstTensorView& a, const ConstTensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rank == b.rank && a.stride == b.stride;
}

void check_types(Report& report, const std::string& prefix, const ConstTensorView& out, const ConstTensorView& lse,
                 bool with_lse) {
  if (!is_floating(out.dtype)) report.add(prefix + "out.dtype", "fp32, fp16 or bf16", std::string(name(out.dtype)));
  if (with_lse && lse.dtype != DType::f32) report.add(prefix + "lse.dtype", "fp32", std::string(name(lse.dtype)));
}

void check_shape(Report& report, const std::string& argument, const ConstTensorView& view, const ConstTensorView& out) {
  if (!same_extents(view, out)) {
    ConstTensorView wanted = out;
    wanted.rank = view.rank;
    report.add(argument + ".shape", "out's " + core::shape_text(wanted), core::shape_text(view));
  }
}

void check_merge(std::span<const Partial> parts, const TensorView& out, const TensorView& lse) {
  Report report;
  const bool with_lse = lse.present();
  const bool out_ok = core::check_output(report, "out", out, kOutLayout, 4, Inner::contiguous);
  if (with_lse && core::check_output(report, "lse", lse, kLseLayout, 3, Inner::any) && out_ok) {
    check_shape(report, "lse", lse, out);
  }
  check_types(report, "", out, lse, with_lse);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::string prefix = "parts[" + std::to_string(p) + "].";
    const Partial& part = parts[p];
    if (core::check_input(report, prefix + "out", part.out, kOutLayout, 4, Inner::contiguous) && out_ok) {
      check_shape(report, prefix + "out", part.out, out);
    }
    if (core::check_input(report, prefix + "lse", part.lse, kLseLayout, 3, Inner::any) && out_ok) {
      check_shape(report, prefix + "lse", part.lse, out);
    }
    check_types(report, prefix, part.out, part.lse, true);
  }
  if (report.reasons.empty()) {
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const std::string prefix = "parts[" + std::to_string(p) + "].";
      if (!same_memory(out, parts[p].out)) core::check_apart(report, "out", out, prefix + "out", parts[p].out);
      core::check_apart(report, "out", out, prefix + "lse", parts[p].lse);
      if (!with_lse) continue;
      core::check_apart(report, "lse", lse, prefix + "out", parts[p].out);
      if (!same_memory(lse, parts[p].lse)) core::check_apart(report, "lse", lse, prefix + "lse", parts[p].lse);
    }
  }
  if (!report.reasons.empty()) throw Error(std::move(report.reasons));
}

std::int64_t row_offset(const ConstTensorView& view, std::int64_t b, std::int64_t h, std::int64_t i) {
  return b * view.step(0) + h * view.step(1) + i * view.step(2);
}

// One row: its weights by part, then its columns.
void merge_row(std::span<const Partial> parts, const TensorView& out, const TensorView& lse, std::int64_t b,
               std::int64_t h, std::int64_t i, std::vector<float>& weights) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float largest = -kInfinity;
  bool undefined = false;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    weights[p] = static_cast<const float*>(parts[p].lse.data)[row_offset(parts[p].lse, b, h, i)];
    undefined = undefined || std::isnan(weights[p]) || weights[p] == kInfinity;
    largest = std::max(largest, weights[p]);
  }
  const bool empty = !undefined && largest == -kInfinity;
  float sum = 0;
  for (float& weight : weights) sum += weight = empty ? 0.0f : std::exp(weight - largest);
  for (std::int64_t c = 0; c < out.extent(3); ++c) {
    float value = undefined ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    for (std::size_t p = 0; p < parts.size() && !undefined && !empty; ++p) {
      const ConstTensorView& from = parts[p].out;
      // A part without a key for the row has nothing to say, whatever its memory holds.
      if (weights[p] == 0.0f) continue;
      value += weights[p] / sum *
               static_cast<float>(core::load_element(from.data, from.dtype, row_offset(from, b, h, i) + c));
    }
    core::store_element(out.data, out.dtype, row_offset(out, b, h, i) + c, static_cast<double>(value));
  }
  if (!lse.present()) return;
  static_cast<float*>(lse.data)[row_offset(lse, b, h, i)] = undefined ? std::numeric_limits<float>::quiet_NaN()
                                                            : empty   ? -kInfinity
                                                                      : largest + std::log(sum);
}

}  // namespace

void merge(std::span<const Partial> parts, const TensorView& out, const TensorView& lse) {
  check_merge(parts, out, lse);
  std::vector<float> weights(parts.size());
  for (std::int64_t b = 0; b < out.extent(0); ++b) {
    for (std::int64_t h = 0; h < out.extent(1); ++h) {
      for (std::int64_t i = 0; i < out.extent(2); ++i) merge_row(parts, out, lse, b, h, i, weights);
    }
  }
}

}  // namespace dspattn
