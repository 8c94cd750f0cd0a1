#include "cpu/norm_rope.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/half.h"
#include "cpu/parallel.h"

namespace dspattn::cpu {
namespace {

using HeadVector = std::array<float, static_cast<std::size_t>(kMaxNormRopeDim)>;

// Elements of a type as they lie in memory.
template <DType kType>
struct Memory {
  using Element = std::conditional_t<kType == DType::f32, float, std::uint16_t>;

  static float decode(Element x) {
    if constexpr (kType == DType::f32)
      return x;
    else
      return kType == DType::bf16 ? core::decode_bf16(x) : core::decode_f16(x);
  }
  static Element encode(float x) {
    if constexpr (kType == DType::f32)
      return x;
    else
      return kType == DType::bf16 ? core::encode_bf16(x) : core::encode_f16(x);
  }
};

// The heads of one token of a part.
template <DType kType>
class Token {
 public:
  using Element = typename Memory<kType>::Element;

  Token(const NormRopeArgs& args, const NormRopePart& part, std::int64_t batch, std::int64_t token)
      : args_(args), part_(part), d_(static_cast<std::size_t>(part.x.extent(3))) {
    x_ = static_cast<const Element*>(part.x.data) + batch * part.x.step(0) + token * part.x.step(1);
    out_ = static_cast<Element*>(part.out.data) + batch * part.out.step(0) + token * part.out.step(1);
    const auto row_of = [&](const ConstTensorView& angles) {
      return static_cast<const float*>(angles.data) + (part.first_position + token) * angles.step(0);
    };
    if (!args.cos.present()) return;
    cos_ = row_of(args.cos);
    sin_ = row_of(args.sin);
  }

  void run() const {
    HeadVector row, turned;
    for (std::int64_t head = 0; head < part_.x.extent(2); ++head) {
      const Element* x = x_ + head * part_.x.step(2);
      Element* out = out_ + head * part_.out.step(2);
      for (std::size_t c = 0; c < d_; ++c) row[c] = Memory<kType>::decode(x[c]);
      if (args_.eps) norm(row);
      if (cos_ != nullptr) turn(row, turned);
      const HeadVector& result = cos_ != nullptr ? turned : row;
      for (std::size_t c = 0; c < d_; ++c) out[c] = Memory<kType>::encode(result[c]);
    }
  }

 private:
  void norm(HeadVector& row) const {
    float sum = 0;
    for (std::size_t c = 0; c < d_; ++c) sum += row[c] * row[c];
    const float factor = 1.0f / std::sqrt(sum / static_cast<float>(d_) + static_cast<float>(*args_.eps));
    const auto* weight = static_cast<const Element*>(part_.weight.data);
    for (std::size_t c = 0; c < d_; ++c) {
      float y = row[c] * factor;
      if (weight != nullptr) y *= Memory<kType>::decode(weight[c]);
      row[c] = cos_ == nullptr ? y : Memory<kType>::decode(Memory<kType>::encode(y));
    }
  }
  void turn(const HeadVector& y, HeadVector& z) const {
    const bool halves = args_.pairs == RopePairs::halves;
    for (std::size_t i = 0; i < d_ / 2; ++i) {
      const std::size_t a = halves ? i : 2 * i, b = halves ? i + d_ / 2 : 2 * i + 1;
      z[a] = y[a] * cos_[a] - y[b] * sin_[a];
      z[b] = y[b] * cos_[b] + y[a] * sin_[b];
    }
  }

  const NormRopeArgs& args_;
  const NormRopePart& part_;
  std::size_t d_;
  const Element* x_;
  Element* out_;
  const float* cos_ = nullptr;
  const float* sin_ = nullptr;
};

template <DType kType>
void run_part(const NormRopeArgs& args, const NormRopePart& part) {
  const std::int64_t tokens = part.x.extent(1);
  parallel_for(part.x.extent(0) * tokens, args.run,
               [&](std::int64_t i) { Token<kType>(args, part, i / tokens, i % tokens).run(); });
}

}  // namespace

void norm_rope(const NormRopeArgs& args) {
  for (const NormRopePart& part : args.parts) {
    if (part.x.elements() == 0) continue;
    switch (part.x.dtype) {
      case DType::bf16:
        run_part<DType::bf16>(args, part);
        break;
      case DType::f16:
        run_part<DType::f16>(args, part);
        break;
      default:
        run_part<DType::f32>(args, part);
    }
  }
}

}  // namespace dspattn::cpu
