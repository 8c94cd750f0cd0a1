#include "cuda/blocks/refusals.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "cuda/blocks/problem_params.h"
#include "cuda/tile/walk.h"

namespace dspattn::cuda::blocks {

void refuse_device(const DeviceFacts& device, bool serves, std::string_view needs, core::Refusals& refusals) {
  if (!device.present) {
    refusals.add([&] { return "device: " + device.absence; });
  } else if (!serves) {
    refusals.add([&] {
      return "device: needs compute capability " + std::string(needs) + ", got " + std::to_string(device.major) + "." +
             std::to_string(device.minor);
    });
  }
}

void refuse_type(DType type, const Problem& problem, core::Refusals& refusals) {
  if (problem.q.dtype == type) return;
  refusals.add([&] { return "q: takes " + std::string(name(type)) + ", got " + std::string(name(problem.q.dtype)); });
}

void refuse_dims(int above, int most, const core::Geometry& geometry, core::Refusals& refusals) {
  const std::int64_t dim = std::max(geometry.d, geometry.d_v);
  if (dim <= most && (dim > above || above == 0)) return;
  refusals.add([&] {
    return "d, d_v: takes a larger of " + std::to_string(above + 1) + " to " + std::to_string(most) + ", got " +
           std::to_string(dim);
  });
}

void refuse_rows(const Problem& problem, const core::Geometry& geometry, core::Refusals& refusals) {
  if (const std::int64_t rows = std::max(geometry.n_q, geometry.n_k); rows > tile::kMaxRows) {
    refusals.add(
        [&] { return "n_q, n_k: takes up to " + std::to_string(tile::kMaxRows) + ", got " + std::to_string(rows); });
  }
  constexpr std::int64_t kMaxPacked = std::int64_t{1} << 30;  // int32, as the cumulative lengths are
  if (const std::int64_t rows = std::max(problem.q.extent(2), problem.k.extent(2));
      problem.packed && rows > kMaxPacked) {
    refusals.add([&] {
      return "q.shape[2], k.shape[2]: takes up to " + std::to_string(kMaxPacked) + " rows of a packed batch, got " +
             std::to_string(rows);
    });
  }
}

void refuse_pages(const Problem& problem, core::Refusals& refusals) {
  if (!problem.block_table.present() || problem.k.extent(0) <= tile::kMaxRows) return;
  refusals.add([&] {
    return "k.shape[0]: takes up to " + std::to_string(tile::kMaxRows) + " pages, got " +
           std::to_string(problem.k.extent(0));
  });
}

void refuse_offset(const Mask& mask, core::Refusals& refusals) {
  constexpr std::int64_t kMaxOffset = tile::kMaxRows / 2;  // sums of positions stay within 32 bits
  if (!is_banded(mask) || std::abs(mask.offset) <= kMaxOffset) return;
  refusals.add([&] {
    return "mask.offset: takes up to " + std::to_string(kMaxOffset) + " either way, got " + std::to_string(mask.offset);
  });
}

void refuse_key_strides(const Mask& mask, std::int64_t most, core::Refusals& refusals) {
  const auto refuse = [&](const char* which, const ConstTensorView& tensor) {
    if (!tensor.present() || tensor.extent(3) <= 1 || std::abs(tensor.step(3)) <= most) return;
    refusals.add([&] {
      return std::string(which) + ": takes a stride along the keys of up to " + std::to_string(most) + ", got " +
             std::to_string(tensor.step(3));
    });
  };
  refuse("allowed", mask.allowed);
  refuse("bias", mask.bias);
}

}  // namespace dspattn::cuda::blocks
