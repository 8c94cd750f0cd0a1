// Weights of which only sums count, straight from scores (tile/coarse_exp2.h), against doubles.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <vector>

#include "core/half.h"
#include "cuda/ptx/packed_half.h"
#include "cuda/tile/coarse_exp2.h"

namespace {

using namespace dspattn;
using cuda::tile::kCoarseLanes;

double decode(std::uint32_t word, bool high = false) {
  return core::decode_f16(static_cast<std::uint16_t>(high ? word >> 16 : word & 0xFFFF));
}
std::uint32_t twice(double value) { return 0x10001u * core::encode_f16(value); }

cuda::tile::CoarseWeights weights_of(double scale, double minus, int lane) {
  return {cuda::tile::coarse_slope(twice(scale)),
          cuda::tile::coarse_offset(twice(minus), cuda::tile::coarse_lane_offset(lane))};
}

using Lanes = std::array<cuda::tile::CoarseWeights, kCoarseLanes>;

// The four lanes' weights of a score, from both halves, with another score in the other half.
std::array<double, kCoarseLanes> coarse(std::uint16_t score, const Lanes& lanes, std::uint16_t other) {
  std::array<double, kCoarseLanes> result;
  for (int lane = 0; lane < kCoarseLanes; ++lane) {
    const std::uint32_t low = lanes[lane].weights(score | std::uint32_t{other} << 16);
    const std::uint32_t high = lanes[lane].weights(other | std::uint32_t{score} << 16);
    EXPECT_EQ(low & 0xFFFF, high >> 16) << score << " beside " << other;
    result[lane] = decode(low) * cuda::tile::coarse_unit(lane);
  }
  return result;
}

// A score's weight 2^x, and the lanes' numbers for it.
struct Weighed {
  double x, power;
  std::array<double, kCoarseLanes> numbers;
};

// Every fp16 score whose weight 2^x may come, with several factors and references: scores beside it are the least and
// one near it. Made once: it takes far longer than what is asked of it.
const std::vector<Weighed>& every_score() {
  static const std::vector<Weighed> all = [] {
    std::vector<Weighed> list;
    for (const double scale : {1.0, 1.442695, 2.875}) {
      for (const double minus : {-4.0, 17.0, -448.0, 448.0}) {
        const double factor = core::decode_f16(core::encode_f16(scale));
        const std::uint16_t near = core::encode_f16(-minus / factor);
        Lanes lanes;
        for (int lane = 0; lane < kCoarseLanes; ++lane) lanes[lane] = weights_of(scale, minus, lane);
        for (unsigned bits = 0; bits < 0x10000; ++bits) {
          const auto score = static_cast<std::uint16_t>(bits);
          const double value = core::decode_f16(score);
          const double x = value * factor + minus;
          if (!(x < 7) || !std::isfinite(value)) continue;
          list.push_back({x, std::exp2(x), coarse(score, lanes, bits % 2 == 0 ? 0xFBFF : near)});
        }
      }
    }
    return list;
  }();
  return all;
}

TEST(CoarseExp2, OneNumberIsWithinSixPercent) {
  double least = 2, most = 0;
  for (const auto& [x, power, numbers] : every_score()) {
    if (x < -22) continue;
    for (const double one : numbers) {
      least = std::min(least, one / power);
      most = std::max(most, one / power);
    }
  }
  // (1 + f) / 2^f is 1 to 1.0615, 1.0381 of which is taken out; logarithms are rounded to 1 / 32 of an octave.
  EXPECT_GT(least, 0.945);
  EXPECT_LT(most, 1.038);
}

TEST(CoarseExp2, TheMeanOfFourIsWithinTwoPercent) {
  for (const auto& [x, power, numbers] : every_score()) {
    if (x < -21) continue;
    const double mean = (numbers[0] + numbers[1] + numbers[2] + numbers[3]) / 4;
    EXPECT_NEAR(mean / power, 1, 0.0155) << x;
    if (x == std::floor(x)) {
      EXPECT_NEAR(mean / power, 1, 1e-6) << x;
    }
  }
}

TEST(CoarseExp2, SmallOnesFadeAndTheLeastIsZero) {
  for (const auto& [x, power, numbers] : every_score()) {
    for (const double one : numbers) {
      EXPECT_GE(one, 0) << x;
      EXPECT_LE(one, 1.04 * std::max(power, 0x1p-22)) << x;
      if (x <= -24) {
        EXPECT_EQ(one, 0) << x;
      }
    }
  }
}

// References of precise weights are fp16 numbers, those of coarse ones the next whole numbers; what is between them is
// known to the last bit.
TEST(CoarseExp2, ReferencesAreWholeNumbersAndWhatTheyDifferByIsExact) {
  const double largest = decode(cuda::tile::kLargestCoarseReference);
  int seen = 0;
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const double minus = decode(bits);
    const std::uint32_t word = bits | 0xFFFFu << 16;  // the other row has none
    const std::uint32_t whole = cuda::tile::coarse_reference(word), octaves = cuda::tile::coarse_octaves(word);
    EXPECT_TRUE(std::isnan(decode(whole, true)) && std::isnan(decode(octaves, true)));
    if (!(std::abs(minus) <= largest)) continue;
    ++seen;
    EXPECT_EQ(decode(whole), std::nearbyint(minus)) << minus;
    EXPECT_EQ(decode(octaves), std::nearbyint(minus) - minus) << minus;
    for (int lane = 0; lane < kCoarseLanes; ++lane) {
      const std::uint32_t of_lane = cuda::tile::coarse_lane_offset(lane);
      EXPECT_EQ(decode(cuda::tile::coarse_offset(whole, of_lane)), decode(of_lane) - std::nearbyint(minus) / 64);
    }
  }
  EXPECT_GT(seen, 40000);
}

// What a row's log-sum-exp is off by, where half of its keys, the smaller one of every two, are weighed so: normal
// scores of several spreads, 1024 of them, added up as lanes do. Scores are fp16 numbers here, and so the truth.
TEST(CoarseExp2, LogSumExpOfNormalScores) {
  constexpr int kDraws = 200, kKeys = 1024;
  const double scale = core::decode_f16(core::encode_f16(std::numbers::log2e));
  std::mt19937_64 random(1);
  for (const double spread : {0.0, 0.25, 0.5, 1.0, 2.0, 3.0}) {
    double mean = 0, most = 0;
    for (int row = 0; row < kDraws; ++row) {
      std::normal_distribution<double> normal(0, spread > 0 ? spread : 1);
      std::vector<std::uint16_t> scores(kKeys);
      double top = -1e9;
      for (auto& score : scores) {
        score = core::encode_f16(spread > 0 ? normal(random) : 0.0);
        top = std::max<double>(top, core::decode_f16(score));
      }
      const std::uint32_t held = twice(-top * scale - 3);
      const double minus = decode(held), whole = decode(cuda::tile::coarse_reference(held));
      double kept = 0, pruned = 0, precise = 0;
      for (int lane = 0; lane < kCoarseLanes; ++lane) {
        const auto of = weights_of(scale, whole, lane);
        for (int tile = 0; tile < kKeys / 128; ++tile) {
          std::uint32_t sum = 0;
          for (int pair = 0; pair < 16; ++pair) {
            const int at = tile * 128 + 2 * (4 * pair + lane);
            const bool first = core::decode_f16(scores[at]) < core::decode_f16(scores[at + 1]);
            const std::uint16_t smaller = scores[at + (first ? 0 : 1)], larger = scores[at + (first ? 1 : 0)];
            kept += std::exp2(core::decode_f16(larger) * scale + minus);
            precise += std::exp2(core::decode_f16(smaller) * scale + minus);
            sum = cuda::ptx::add_f16x2(sum, of.weights(0x10001u * smaller));
          }
          pruned += decode(sum) * cuda::tile::coarse_unit(lane) * std::exp2(-decode(cuda::tile::coarse_octaves(held)));
        }
      }
      const double off = std::log((kept + pruned) / (kept + precise));
      mean += std::abs(off) / kDraws;
      most = std::max(most, std::abs(off));
    }
    RecordProperty("spread_" + std::to_string(spread),
                   std::to_string(mean) + " mean, " + std::to_string(most) + " most");
    // Equal scores are exact here, whole logarithms; spread ones are 0.25 % too heavy, of up to two fifths of a row.
    EXPECT_LT(mean, spread == 0 ? 1e-6 : 1.2e-3) << spread;
    EXPECT_LT(most, spread == 0 ? 1e-6 : 2.5e-3) << spread;
  }
}

}  // namespace
