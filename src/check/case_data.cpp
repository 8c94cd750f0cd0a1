#include "check/case_data.h"

#include <cmath>
#include <limits>

#include "check/random.h"
#include "core/half.h"

namespace dspattn::check {
namespace {

// One stream of numbers per tensor, so that a change of one does not change the others.
enum class Stream : std::uint64_t { q = 1, k, v, d_out, allowed, bias, nan, nan_in_q, sinks, d_lse, pages };

Random stream_of(const Case& drawn, Stream stream) {
  return {drawn.seed ^ (static_cast<std::uint64_t>(stream) << 56), static_cast<std::uint64_t>(drawn.index)};
}

// Elements of q and k: |T| <= 256 * 4 + 8 < 2048, so integers are exact even in fp16.
double draw_value(Random& random, bool integers) {
  return integers ? static_cast<double>(random.between(-2, 2)) : random.bell();
}

ConstTensorView mask_view(DType dtype, const Broadcast& broadcast, std::array<std::int64_t, 4> full) {
  for (std::size_t dim = 0; dim < 4; ++dim) {
    if (broadcast.one[dim]) full[dim] = 1;
  }
  ConstTensorView view(nullptr, dtype, {full[0], full[1], full[2], full[3]});
  for (std::size_t dim = 0; dim < 4; ++dim) {
    if (broadcast.zero_stride[dim]) view.stride[dim] = 0;
  }
  return view;
}

}  // namespace

std::int64_t offset_of(Layout layout) { return layout == Layout::padded ? 3 : 0; }

CaseData::CaseData(const Case& drawn, Device device, core::DeviceMemory& memory)
    : drawn_(drawn), device_(device), memory_(memory) {
  lead_ = drawn.packed ? 1 : drawn.batch;
  rows_q_ = drawn.packed ? drawn.cu_q.back() + drawn.tail_q : drawn.n_q;
  rows_k_ = drawn.packed ? drawn.cu_k.back() + drawn.tail_k : drawn.n_k;
  make_values();
  make_masks();
  make_features();
  if (drawn.value_sums) make_value_sums();
  if (drawn.page > 0) make_pages();
  for (Tensor* tensor : {&q_, &k_, &v_, &d_out_, &key_lengths_, &allowed_, &bias_, &cu_q_, &cu_k_, &dropout_state_,
                         &sinks_, &d_lse_, &block_table_, &k_pages_, &v_pages_, &value_sums_}) {
    if (tensor->present()) tensor->upload();
  }
  device_problem_ = problem(true);
  host_problem_ = problem(false);
}

void CaseData::make_values() {
  const auto make = [&](Tensor& tensor, Stream stream, std::array<std::int64_t, 4> shape, Layout layout,
                        std::int64_t end, bool integers, double magnitude, DType dtype) {
    tensor = Tensor(memory_, laid_out(dtype, shape, layout), offset_of(layout));
    Random random = stream_of(drawn_, stream);
    tensor.fill([&](std::int64_t, std::int64_t, std::int64_t row, std::int64_t) {
      const double value = magnitude * draw_value(random, integers);
      // Rows past the last sequence belong to nobody: NaN shows whether they leak into a result.
      return row < end ? value : std::numeric_limits<double>::quiet_NaN();
    });
  };
  const std::int64_t end_q = drawn_.packed ? drawn_.cu_q.back() : rows_q_;
  const std::int64_t end_k = drawn_.packed ? drawn_.cu_k.back() : rows_k_;
  make(q_, Stream::q, {lead_, drawn_.heads, rows_q_, drawn_.d}, drawn_.q_layout, end_q, drawn_.integers,
       drawn_.magnitude, drawn_.dtype);
  make(k_, Stream::k, {lead_, drawn_.kv_heads, rows_k_, drawn_.d}, drawn_.k_layout, end_k, drawn_.integers,
       drawn_.magnitude_k, drawn_.dtype);
  make(v_, Stream::v, {lead_, drawn_.kv_heads, rows_k_, drawn_.d_v}, drawn_.v_layout, end_k, false, 1, drawn_.dtype);
  if (drawn_.pass == Pass::backward) {
    make(d_out_, Stream::d_out, {lead_, drawn_.heads, rows_q_, drawn_.d_v}, drawn_.out_layout, end_q, false, 1,
         drawn_.result_dtype());
  }
  const auto put_nan = [&](Tensor& tensor, Stream stream, std::int64_t heads, std::int64_t rows) {
    if (lead_ == 0 || rows == 0) return;
    Random random = stream_of(drawn_, stream);
    // One statement each: the order in which arguments are evaluated differs between compilers.
    const std::int64_t b = random.below(lead_);
    const std::int64_t h = random.below(heads);
    const std::int64_t row = random.below(rows);
    tensor.set(std::numeric_limits<double>::quiet_NaN(), b, h, row, random.below(drawn_.d));
  };
  for (std::int64_t s = 0; drawn_.nan_past_length && s < drawn_.batch; ++s) {
    const std::int64_t begin = drawn_.packed ? drawn_.cu_k[static_cast<std::size_t>(s)] : 0;
    for (std::int64_t j = drawn_.key_lengths[static_cast<std::size_t>(s)]; j < drawn_.length_k(s); ++j) {
      for (std::int64_t h = 0; h < drawn_.kv_heads; ++h) {
        for (std::int64_t c = 0; c < drawn_.d_v; ++c) {
          v_.set(std::numeric_limits<double>::quiet_NaN(), drawn_.packed ? 0 : s, h, begin + j, c);
        }
      }
    }
  }
  if (drawn_.nan_in_k) put_nan(k_, Stream::nan, drawn_.kv_heads, end_k);
  if (drawn_.nan_in_q) put_nan(q_, Stream::nan_in_q, drawn_.heads, end_q);
}

void CaseData::make_masks() {
  const auto ints = [&](const std::vector<std::int32_t>& values, std::int64_t stride) {
    Tensor tensor(memory_, ConstTensorView(nullptr, DType::i32, {static_cast<std::int64_t>(values.size())}, {stride}));
    tensor.fill([&](std::int64_t i, std::int64_t, std::int64_t, std::int64_t) {
      return static_cast<double>(values[static_cast<std::size_t>(i)]);
    });
    return tensor;
  };
  if (drawn_.packed) {
    cu_q_ = ints(drawn_.cu_q, drawn_.cu_stride);
    cu_k_ = ints(drawn_.cu_k, drawn_.cu_stride);
  }
  if (!drawn_.key_lengths.empty()) key_lengths_ = ints(drawn_.key_lengths, drawn_.key_lengths_stride);
  const std::array<std::int64_t, 4> full{drawn_.batch, drawn_.heads, drawn_.n_q, drawn_.n_k};
  if (drawn_.allowed) {
    allowed_ = Tensor(memory_, mask_view(DType::b8, *drawn_.allowed, full));
    Random random = stream_of(drawn_, Stream::allowed);
    const int percent = static_cast<int>(random.between(20, 95));
    allowed_.fill(
        [&](std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return random.chance(percent) ? 1.0 : 0.0; });
  }
  if (drawn_.bias) {
    bias_ = Tensor(memory_, mask_view(drawn_.bias_dtype, *drawn_.bias, full));
    Random random = stream_of(drawn_, Stream::bias);
    const double unit = drawn_.integers ? *drawn_.scale : 0.25;  // with integers, bias/scale is one, too
    bias_.fill([&](std::int64_t, std::int64_t, std::int64_t, std::int64_t) {
      const double step = static_cast<double>(random.between(-8, 8));
      const double fine = drawn_.integers ? 0.0 : random.uniform();
      if (random.chance(10)) return -std::numeric_limits<double>::infinity();
      if (drawn_.lowest_bias && random.chance(30)) return -core::largest_of(drawn_.bias_dtype);
      if (!drawn_.extreme_bias || !random.chance(40)) return unit * (step + fine);
      // Equal or far apart, so that every precision gives the same weights.
      const double size = std::ldexp(core::largest_of(drawn_.bias_dtype), -static_cast<int>(random.below(4)));
      return random.chance(50) ? size : -size;
    });
  }
}

void CaseData::make_features() {
  if (drawn_.dropout > 0 && drawn_.dropout_state) {
    const std::uint64_t numbers[2] = {drawn_.dropout_seed, drawn_.dropout_offset};
    dropout_state_ = Tensor(memory_, ConstTensorView(nullptr, DType::i32, {4}));
    dropout_state_.fill([&](std::int64_t word, std::int64_t, std::int64_t, std::int64_t) {
      const std::uint64_t number = numbers[word / 2];
      return static_cast<double>(static_cast<std::int32_t>(word % 2 == 0 ? number : number >> 32));
    });
  }
  if (drawn_.sinks) {
    sinks_ = Tensor(memory_, ConstTensorView(nullptr, DType::f32, {drawn_.heads}));
    Random random = stream_of(drawn_, Stream::sinks);
    sinks_.fill([&](std::int64_t, std::int64_t, std::int64_t, std::int64_t) {
      const double value = 2 * random.bell();
      if (random.chance(10)) return -std::numeric_limits<double>::infinity();
      return random.chance(10) ? 20 + value : value;
    });
  }
  if (drawn_.d_lse) {
    d_lse_ = Tensor(memory_, lse_view());
    Random random = stream_of(drawn_, Stream::d_lse);
    const std::int64_t end = drawn_.packed ? drawn_.cu_q.back() : rows_q_;
    d_lse_.fill([&](std::int64_t, std::int64_t, std::int64_t row, std::int64_t) {
      const double value = random.bell();
      return row < end ? value : std::numeric_limits<double>::quiet_NaN();
    });
  }
}

// What a caller keeps who has updated them: of blocks at or past the length, and of one more, anything.
void CaseData::make_value_sums() {
  constexpr std::int64_t kBlock = 128;
  const std::int64_t blocks = drawn_.n_k / kBlock;
  value_sums_ = Tensor(
      memory_, ConstTensorView(nullptr, DType::f32, {drawn_.batch, drawn_.kv_heads, 2 * (blocks + 1), drawn_.d_v + 1}));
  value_sums_.poison();
  for (std::int64_t b = 0; b < drawn_.batch; ++b) {
    const auto of_sequence = static_cast<std::size_t>(drawn_.key_lengths_stride == 0 ? 0 : b);
    const std::int64_t length = drawn_.key_lengths.empty() ? drawn_.n_k : drawn_.key_lengths[of_sequence];
    for (std::int64_t h = 0; h < drawn_.kv_heads; ++h) {
      for (std::int64_t c = 0; c <= drawn_.d_v; ++c) {
        double so_far = 0;
        for (std::int64_t block = 0; block < length / kBlock; ++block) {
          double sum = 0;
          for (std::int64_t j = block * kBlock; j < (block + 1) * kBlock; ++j) {
            sum += c < drawn_.d_v ? v_.at(b, h, j, c) : 1;
          }
          so_far += sum;
          value_sums_.set(sum, b, h, 2 * block, c);
          value_sums_.set(so_far, b, h, 2 * block + 1, c);
        }
      }
    }
  }
}

// Pages in any order, with two that nobody has. What lies past a length may be no page.
void CaseData::make_pages() {
  const std::int64_t blocks = drawn_.n_k / drawn_.page;
  Random random = stream_of(drawn_, Stream::pages);
  std::vector<std::int32_t> places(static_cast<std::size_t>(drawn_.batch * blocks + 2));
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto j = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i) + 1));
    places[i] = places[j];
    places[j] = static_cast<std::int32_t>(i);
  }
  block_table_ = Tensor(memory_, ConstTensorView(nullptr, DType::i32, {drawn_.batch, blocks}));
  block_table_.fill([&](std::int64_t b, std::int64_t block, std::int64_t, std::int64_t) {
    const std::size_t lengths = drawn_.key_lengths.size();
    const auto of_sequence = static_cast<std::size_t>(drawn_.key_lengths_stride == 0 ? 0 : b);
    const bool past = lengths > 0 && drawn_.key_lengths[of_sequence] <= block * drawn_.page;
    if (past && random.chance(50)) return random.chance(50) ? -1.0 : static_cast<double>(places.size());
    return static_cast<double>(places[static_cast<std::size_t>(b * blocks + block)]);
  });
  k_pages_ = paged(k_, drawn_.k_layout);
  v_pages_ = paged(v_, drawn_.v_layout);
}

Tensor CaseData::paged(const Tensor& rows, Layout layout) const {
  const ConstTensorView from = rows.host_view();
  const std::int64_t blocks = drawn_.n_k / drawn_.page, places = drawn_.batch * blocks + 2;
  Tensor pages(memory_, laid_out(from.dtype, {places, from.extent(1), drawn_.page, from.extent(3)}, layout),
               offset_of(layout));
  for (std::int64_t b = 0; b < drawn_.batch; ++b) {
    for (std::int64_t j = 0; j < drawn_.n_k; ++j) {
      const auto place = static_cast<std::int64_t>(block_table_.at(b, j / drawn_.page));
      if (place < 0 || place >= places) continue;
      for (std::int64_t h = 0; h < from.extent(1); ++h) {
        for (std::int64_t c = 0; c < from.extent(3); ++c) {
          pages.set(rows.at(b, h, j, c), place, h, j % drawn_.page, c);
        }
      }
    }
  }
  return pages;
}

Tensor CaseData::output(std::array<std::int64_t, 4> shape) const {
  Tensor tensor(memory_, laid_out(drawn_.result_dtype(), shape, drawn_.out_layout), offset_of(drawn_.out_layout));
  tensor.upload();
  return tensor;
}

Tensor CaseData::output_like_q(std::int64_t width) const { return output({lead_, drawn_.heads, rows_q_, width}); }

Tensor CaseData::output_like_k(std::int64_t width) const { return output({lead_, drawn_.kv_heads, rows_k_, width}); }

ConstTensorView CaseData::lse_view() const {
  ConstTensorView view(nullptr, DType::f32, {lead_, drawn_.heads, rows_q_});
  if (drawn_.out_layout == Layout::bnhd) view.stride = {rows_q_ * drawn_.heads, 1, drawn_.heads, 0};
  return view;
}

Tensor CaseData::lse_output() const {
  Tensor tensor(memory_, lse_view());
  tensor.upload();
  return tensor;
}

Tensor CaseData::d_bias_output() const {
  const ConstTensorView bias = bias_.host_view();
  const DType dtype = drawn_.fp32_results ? DType::f32 : drawn_.bias_dtype;
  Tensor tensor(memory_, {nullptr, dtype, {bias.extent(0), bias.extent(1), bias.extent(2), bias.extent(3)}});
  tensor.upload();
  return tensor;
}

Tensor CaseData::d_sinks_output() const {
  Tensor tensor(memory_, ConstTensorView(nullptr, DType::f32, {drawn_.heads}));
  tensor.upload();
  return tensor;
}

Problem CaseData::problem(bool on_device) const {
  const auto view = [&](const Tensor& tensor) {
    if (!tensor.present()) return ConstTensorView();
    return on_device ? ConstTensorView(tensor.device_view()) : tensor.host_view();
  };
  Problem problem;
  if (on_device) problem.device = device_;
  problem.q = view(q_);
  problem.k = view(k_);
  problem.v = view(v_);
  problem.pattern = drawn_.pattern;
  problem.grouping = drawn_.grouping;
  problem.mask.causal = drawn_.causal;
  problem.mask.alignment = drawn_.alignment;
  problem.mask.offset = drawn_.offset;
  problem.mask.window_left = drawn_.window_left;
  problem.mask.window_right = drawn_.window_right;
  problem.mask.key_lengths = view(key_lengths_);
  problem.mask.allowed = view(allowed_);
  problem.mask.bias = view(bias_);
  problem.scale = drawn_.scale;
  problem.fp32_products = drawn_.fp32_products;
  problem.rest = drawn_.rest;
  problem.choice = drawn_.choice;
  problem.dropout = {drawn_.dropout, drawn_.dropout_seed, drawn_.dropout_offset, view(dropout_state_)};
  if (drawn_.dropout_state) problem.dropout.seed = problem.dropout.offset = 0;
  problem.soft_cap = drawn_.soft_cap;
  problem.sinks = view(sinks_);
  problem.value_sums = view(value_sums_);
  // The oracle sees the keys in one piece.
  if (on_device && drawn_.page > 0) {
    problem.k = view(k_pages_);
    problem.v = view(v_pages_);
    problem.block_table = view(block_table_);
  }
  if (drawn_.packed) problem.packed = Packed{view(cu_q_), view(cu_k_), drawn_.n_q, drawn_.n_k};
  return problem;
}

}  // namespace dspattn::check
