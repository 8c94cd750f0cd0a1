// Few queries with rest = mean on a GPU: the split-key rows read sums of V that the caller keeps, and the function that
// brings these up to date beside the CPU's. Skipped without a GPU of sm_80 or later.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check/check.h"
#include "check/random.h"
#include "core/half.h"
#include "cuda/decode_problems.h"
#include "cuda/device/device.h"
#include "cuda/random_problems.h"
#include "dspattn/value_sums.h"

namespace dspattn {
namespace {

struct RestRow {
  const char* name;
  DType dtype;
  std::int64_t dim;
};

class DecodeRest : public ::testing::TestWithParam<RestRow> {
 protected:
  void SetUp() override {
    if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  }
  check::Case problem(std::int64_t heads, std::int64_t kv_heads, std::int64_t n_q, std::int64_t n_k) const {
    check::Case drawn = few_queries(GetParam().dtype, GetParam().dim, heads, kv_heads, n_q, n_k);
    drawn.rest = Rest::mean;
    drawn.value_sums = true;
    return drawn;
  }
  void expect_right(const check::Case& drawn) const { dspattn::expect_right(drawn, GetParam().name); }
};

TEST_P(DecodeRest, OneQueryAndSeveral) {
  for (const std::int64_t n_k : {100, 128, 700}) {
    expect_right(problem(2, 2, 1, n_k));
    expect_right(problem(4, 1, 3, n_k));
  }
  check::Case pairs = problem(2, 2, 1, 520);
  pairs.pattern = {1, 2};
  expect_right(pairs);
}

// Rows see other blocks; some see none that is whole.
TEST_P(DecodeRest, WindowsAndDiagonals) {
  check::Case drawn = problem(2, 1, 20, 500);
  drawn.causal = true;
  expect_right(drawn);
  for (const std::int64_t left : {60, 150, 300}) {
    drawn.window_left = left;
    expect_right(drawn);
  }
  drawn.n_q = 40;  // and as many keys before the diagonal that the first rows see none
  drawn.n_k = 30;
  expect_right(drawn);
}

// V is NaN past the lengths, and so are the sums.
TEST_P(DecodeRest, LengthsAndPages) {
  check::Case drawn = problem(4, 2, 1, 640);
  drawn.batch = 3;
  drawn.key_lengths = {0, 130, 639};
  drawn.nan_past_length = true;
  expect_right(drawn);
  drawn.page = 16;
  expect_right(drawn);
  drawn.page = 64;
  expect_right(drawn);
}

TEST_P(DecodeRest, HeadsThatChooseTogether) {
  if (GetParam().dtype == DType::f32) GTEST_SKIP() << "fp32 heads do not";
  check::Case drawn = problem(4, 1, 1, 700);
  drawn.choice = Choice::shared;
  expect_right(drawn);
  drawn.n_q = 3;
  drawn.causal = true;
  expect_right(drawn);
}

INSTANTIATE_TEST_SUITE_P(Rows, DecodeRest,
                         ::testing::Values(RestRow{"decode_bf16_d64", DType::bf16, 64},
                                           RestRow{"decode_bf16_d128", DType::bf16, 128},
                                           RestRow{"decode_fp16_d64", DType::f16, 64},
                                           RestRow{"decode_fp32_d64", DType::f32, 64},
                                           RestRow{"decode_fp32_d128", DType::f32, 128}),
                         [](const auto& row) { return std::string(row.param.name); });

// Sums on the device, and V, of a cache that grows.
struct Cache {
  std::int64_t batch = 2, heads = 3, n_k = 700, d_v = 40;
  std::int64_t blocks = n_k / 128;
  std::vector<std::uint16_t> v = std::vector<std::uint16_t>(static_cast<std::size_t>(batch * heads * n_k * d_v));
  std::vector<float> sums = std::vector<float>(static_cast<std::size_t>(batch * heads * 2 * blocks * (d_v + 1)), NAN);

  Cache() {
    check::Random random(11, 1);
    for (std::uint16_t& x : v) x = core::encode_bf16(random.bell());
  }
  ValueSumsArgs args(const void* of_v, void* of_sums, const std::int32_t* lengths, std::int64_t new_keys) const {
    ValueSumsArgs a;
    a.v = {of_v, DType::bf16, {batch, heads, n_k, d_v}};
    a.sums = {of_sums, DType::f32, {batch, heads, 2 * blocks, d_v + 1}};
    if (lengths != nullptr) a.key_lengths = {lengths, DType::i32, {batch}};
    a.new_keys = new_keys;
    return a;
  }
};

// A prompt, steps of one key and of several, and a sequence that is far ahead of the other: as on the CPU, which adds
// in another order.
TEST(ValueSumsOnGpu, AreThoseOfTheCpu) {
  if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  Cache cache;
  core::DeviceBuffer v(gpu_memory(), 2 * cache.v.size()), sums(gpu_memory(), 4 * cache.sums.size()),
      lengths(gpu_memory(), 8);
  v.upload(cache.v.data());
  sums.upload(cache.sums.data());
  struct Step {
    std::int32_t lengths[2];
    std::int64_t new_keys;
  };
  for (const Step& step : {Step{{127, 500}, 500}, Step{{128, 501}, 1}, Step{{129, 511}, 10}, Step{{300, 640}, 171}}) {
    lengths.upload(step.lengths);
    ValueSumsArgs on_gpu =
        cache.args(v.data(), sums.data(), static_cast<const std::int32_t*>(lengths.data()), step.new_keys);
    on_gpu.device = kGpu;
    update_value_sums(on_gpu);
    update_value_sums(cache.args(cache.v.data(), cache.sums.data(), step.lengths, step.new_keys));
    std::vector<float> found(cache.sums.size());
    sums.download(found.data());
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (std::isnan(cache.sums[i])) {
        ASSERT_TRUE(std::isnan(found[i])) << i << ": of a block that is not whole";
      } else {
        ASSERT_NEAR(found[i], cache.sums[i], 1e-4) << i;
      }
    }
  }
}

}  // namespace
}  // namespace dspattn
