#include "check/tensor.h"

#include <algorithm>

#include "core/half.h"

namespace dspattn::check {
namespace {

constexpr std::size_t kGuardBytes = 256;  // a cache line or vector written past the end still hits it; keeps alignment
constexpr std::byte kPoison{0xff};

}  // namespace

Tensor::Tensor(core::DeviceMemory& memory, const ConstTensorView& view, std::int64_t offset_elems) : view_(view) {
  view_.data = nullptr;
  std::int64_t last = -1;
  if (view.elements() > 0) {
    last = 0;
    for (int dim = 0; dim < view.rank; ++dim) last += (view.extent(dim) - 1) * view.step(dim);
  }
  begin_bytes_ = kGuardBytes + static_cast<std::size_t>(offset_elems) * size_bytes(view.dtype);
  host_.assign(begin_bytes_ + static_cast<std::size_t>(last + 1) * size_bytes(view.dtype) + kGuardBytes, kPoison);
  device_ = core::DeviceBuffer(memory, host_.size());
}

TensorView Tensor::view_at(std::byte* data) const {
  TensorView view;
  view.data = data;
  view.dtype = view_.dtype;
  view.rank = view_.rank;
  view.shape = view_.shape;
  view.stride = view_.stride;
  return view;
}

std::int64_t Tensor::offset(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) const {
  const std::int64_t index[4] = {i0, i1, i2, i3};
  std::int64_t sum = 0;
  for (int dim = 0; dim < view_.rank; ++dim) sum += index[dim] * view_.step(dim);
  return sum;
}

void Tensor::each_index(const std::function<void(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>& call) const {
  const auto extent = [&](int dim) { return dim < view_.rank ? view_.extent(dim) : 1; };
  for (std::int64_t i0 = 0; i0 < extent(0); ++i0) {
    for (std::int64_t i1 = 0; i1 < extent(1); ++i1) {
      for (std::int64_t i2 = 0; i2 < extent(2); ++i2) {
        for (std::int64_t i3 = 0; i3 < extent(3); ++i3) call(i0, i1, i2, i3);
      }
    }
  }
}

void Tensor::fill(const std::function<double(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>& value) {
  each_index([&](std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) {
    set(value(i0, i1, i2, i3), i0, i1, i2, i3);
  });
}

void Tensor::poison() { std::fill(host_.begin(), host_.end(), kPoison); }

double Tensor::at(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) const {
  return core::load_element(host_.data() + begin_bytes_, view_.dtype, offset(i0, i1, i2, i3));
}

void Tensor::set(double value, std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) {
  core::store_element(host_.data() + begin_bytes_, view_.dtype, offset(i0, i1, i2, i3), value);
}

bool Tensor::is_poisoned(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) const {
  const std::size_t size = size_bytes(view_.dtype);
  const auto begin = host_.begin() + static_cast<std::ptrdiff_t>(
                                         begin_bytes_ + static_cast<std::size_t>(offset(i0, i1, i2, i3)) * size);
  return std::all_of(begin, begin + static_cast<std::ptrdiff_t>(size), [](std::byte b) { return b == kPoison; });
}

bool Tensor::surroundings_intact() const {
  std::vector<bool> is_element(host_.size(), false);
  const std::size_t size = size_bytes(view_.dtype);
  each_index([&](std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) {
    const std::size_t begin = begin_bytes_ + static_cast<std::size_t>(offset(i0, i1, i2, i3)) * size;
    std::fill_n(is_element.begin() + static_cast<std::ptrdiff_t>(begin), size, true);
  });
  for (std::size_t i = 0; i < host_.size(); ++i) {
    if (!is_element[i] && host_[i] != kPoison) return false;
  }
  return true;
}

ConstTensorView laid_out(DType dtype, std::array<std::int64_t, 4> shape, Layout layout) {
  const auto [batch, heads, rows, width] = shape;
  ConstTensorView view(nullptr, dtype, {batch, heads, rows, width});
  switch (layout) {
    case Layout::bhnd:
      break;
    case Layout::bnhd:
      view.stride = {rows * heads * width, width, heads * width, 1};
      break;
    case Layout::padded:
      // Odd gaps: rows, heads and batches all start off any vector's alignment.
      view.stride = {heads * (rows * (width + 3) + 5) + 7, rows * (width + 3) + 5, width + 3, 1};
      break;
  }
  return view;
}

}  // namespace dspattn::check
