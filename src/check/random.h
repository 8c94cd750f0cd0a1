// Random numbers that are the same on every platform: SplitMix64 (Steele, Lea, Flood 2014), integer arithmetic and
// exact sums only, no library distributions.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace dspattn::check {

class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream) : state_(mix(seed ^ mix(stream + 0x9e3779b97f4a7c15ull))) {}

  std::uint64_t bits() {
    state_ += 0x9e3779b97f4a7c15ull;
    return mix(state_);
  }
  // 0 ... count-1.
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>((bits() >> 1) % static_cast<std::uint64_t>(count));
  }
  // low ... high, both included.
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  // In [-1, 1), a multiple of 2^-31.
  double uniform() { return static_cast<double>(bits() >> 32) * 0x1p-31 - 1.0; }
  // Near normal with variance 1 and range +-3.46: a sum of four.
  double bell() { return (uniform() + uniform() + uniform() + uniform()) * 0.8660254037844386; }
  template <typename Value>
  Value one_of(std::initializer_list<Value> values) {
    return *(values.begin() + below(static_cast<std::int64_t>(values.size())));
  }

 private:
  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }

  std::uint64_t state_;
};

}  // namespace dspattn::check
