#include "cuda/blocks/problem_params.h"

#include <algorithm>
#include <cstdint>
#include <numbers>

#include "core/half.h"

namespace dspattn::cuda::blocks {

tile::LengthsView lengths_of(const ConstTensorView& tensor) {
  if (!tensor.present()) return {};
  return {static_cast<const std::int32_t*>(tensor.data), tensor.step(0)};
}

OutView out_of(const TensorView& out) {
  return {out.data,
          out.step(0),
          out.step(1),
          out.step(2),
          static_cast<int>(out.extent(3)),
          out.dtype == DType::f32 ? 1 : 0};
}

LseView lse_of(const TensorView& lse) {
  if (!lse.present()) return {};
  return {static_cast<float*>(lse.data), lse.step(0), lse.step(1), lse.step(2)};
}

LseView read_lse_of(const ConstTensorView& lse) {
  if (!lse.present()) return {};
  return {const_cast<float*>(static_cast<const float*>(lse.data)), lse.step(0), lse.step(1), lse.step(2)};
}

RowsView rows_of(const ConstTensorView& tensor) {
  return {tensor.data, tensor.step(0), tensor.step(1), tensor.step(2)};
}

MaskTensor mask_of(const ConstTensorView& tensor) {
  if (!tensor.present()) return {};
  const auto stride = [&](int dim) { return tensor.extent(dim) == 1 ? 0 : tensor.step(dim); };
  return {tensor.data, stride(0), stride(1), stride(2), stride(3)};
}

int bias_bytes_of(const Mask& mask) { return mask.bias.present() ? static_cast<int>(size_bytes(mask.bias.dtype)) : 0; }

Pages pages_of(const Problem& problem) { return pages_of(problem.block_table, problem.k); }

Pages pages_of(const ConstTensorView& block_table, const ConstTensorView& pages) {
  if (!block_table.present()) return {};
  return {static_cast<const std::int32_t*>(block_table.data), block_table.step(0), block_table.step(1),
          tile::Divisor(static_cast<int>(pages.extent(2))), static_cast<int>(pages.extent(0))};
}

SumsView sums_of(const TensorView& sums) {
  return {static_cast<float*>(sums.data), sums.step(0), sums.step(1), sums.step(2)};
}

SumsView read_sums_of(const ConstTensorView& sums) {
  if (!sums.present()) return {};
  return {const_cast<float*>(static_cast<const float*>(sums.data)), sums.step(0), sums.step(1), sums.step(2)};
}

RandomState random_state_of(const Dropout& dropout) {
  RandomState random{dropout.seed, dropout.offset, nullptr, 0};
  if (dropout.state.present()) {
    random.words = static_cast<const std::int32_t*>(dropout.state.data);
    random.stride = dropout.state.step(0);
  }
  return random;
}

bool is_vector(const ConstTensorView& tensor) {
  const auto width = static_cast<std::int64_t>(16 / size_bytes(tensor.dtype));
  const std::int64_t columns = tensor.extent(3);
  return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 && columns % width == 0 && columns > 0 &&
         tensor.step(0) % width == 0 && tensor.step(1) % width == 0 && tensor.step(2) % width == 0;
}

TensorView contiguous_out(const Problem& problem) {
  const ConstTensorView& q = problem.q;
  auto* stand_in = reinterpret_cast<void*>(std::uintptr_t{1} << 12);
  return {stand_in, q.dtype, {q.extent(0), q.extent(1), q.extent(2), problem.v.extent(3)}};
}

bool is_empty(const core::Geometry& geometry) {
  return geometry.batch == 0 || geometry.heads == 0 || geometry.n_q == 0 || geometry.d_v == 0;
}

bool is_banded(const Mask& mask) { return mask.causal || mask.window_left || mask.window_right; }

ScoreScales scales_of(DType type, double scale, bool has_bias) {
  ScoreScales s;
  const double unit = type == DType::f32 && has_bias ? std::min(1.0, core::selection_scale(scale)) : 1.0;
  const double selection = type == DType::f32 ? unit : core::selection_scale(scale);
  s.score_unit = static_cast<float>(unit);
  s.q_scale = 0x10001u * (type == DType::f16 ? core::encode_f16(selection) : core::encode_bf16(selection));
  s.exp2_scale = static_cast<float>(scale / selection * std::numbers::log2e);
  const std::uint16_t half = core::encode_f16(s.exp2_scale);
  s.exp2_scale_half = 0x10001u * half;
  s.exp2_scale_ratio = static_cast<float>(s.exp2_scale / core::decode_f16(half));
  s.bias_scale = static_cast<float>(selection / scale);
  return s;
}

WorkParams work_of(const Problem& problem) {
  const core::Geometry geometry = core::geometry_of(problem);
  WorkParams w{};
  if (problem.packed) {
    w.cumulative_q = lengths_of(problem.packed->cu_q);
    w.cumulative_k = lengths_of(problem.packed->cu_k);
  }
  w.key_lengths = lengths_of(problem.mask.key_lengths);
  w.q_rows = static_cast<int>(problem.q.extent(2));
  w.k_rows = static_cast<int>(problem.k.extent(2));
  w.heads = tile::Divisor(static_cast<int>(geometry.heads));
  w.heads_per_kv_head = tile::Divisor(static_cast<int>(geometry.heads / geometry.kv_heads));
  w.n_q = static_cast<int>(geometry.n_q);
  w.n_k = static_cast<int>(geometry.n_k);
  const core::Band band = core::band_of(problem.mask);
  w.left = tile::clamped_reach(band.left);
  w.right = tile::clamped_reach(band.right);
  w.bottom_right = band.bottom_right ? 1 : 0;
  w.offset = is_banded(problem.mask) ? static_cast<int>(band.offset) : 0;
  return w;
}

PrepareParams packed_rows(const ForwardArgs& args) {
  const Problem& problem = args.problem;
  const core::Geometry geometry = core::geometry_of(problem);
  PrepareParams s;
  if (problem.packed) {
    s.cumulative_q = lengths_of(problem.packed->cu_q);
    s.cumulative_k = lengths_of(problem.packed->cu_k);
  }
  s.key_lengths = lengths_of(problem.mask.key_lengths);
  s.sequences = static_cast<int>(geometry.batch);
  s.n_q = static_cast<int>(geometry.n_q);
  s.n_k = static_cast<int>(geometry.n_k);
  s.q_rows = static_cast<int>(problem.q.extent(2));
  s.k_rows = static_cast<int>(problem.k.extent(2));
  s.out = out_of(args.out);
  s.lse = lse_of(args.lse);
  s.heads = static_cast<int>(geometry.heads);
  s.out_bytes = static_cast<int>(size_bytes(args.out.dtype));
  return s;
}

}  // namespace dspattn::cuda::blocks
