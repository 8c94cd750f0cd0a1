// Norm and rotation of queries and keys on a GPU, against fp64 loops. Skipped without a GPU of sm_80 or later.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/decode_problems.h"
#include "cuda/random_problems.h"
#include "dspattn/norm_rope.h"
#include "norm_rope_cases.h"

namespace dspattn {
namespace {

core::DeviceBuffer uploaded(const std::vector<std::uint8_t>& bytes) {
  core::DeviceBuffer buffer(gpu_memory(), bytes.size());
  buffer.upload(bytes.data());
  return buffer;
}

void expect_right_on_gpu(const NormRopeCase& one, std::uint64_t seed) {
  const NormRopeData data(one, seed);
  std::vector<core::DeviceBuffer> held;
  std::vector<const void*> x, weights;
  for (std::size_t i = 0; i < data.x.size(); ++i) {
    x.push_back(held.emplace_back(uploaded(data.x[i])).data());
    weights.push_back(held.emplace_back(uploaded(data.weights[i])).data());
  }
  const core::DeviceBuffer cos = uploaded(data.cos), sin = uploaded(data.sin), out = uploaded(data.out);
  NormRopeArgs args = data.args(x, weights, cos.data(), sin.data(), out.data());
  args.device = kGpu;
  norm_rope(args);
  std::vector<std::uint8_t> found(data.out.size());
  out.download(found.data());
  data.expect_right(found);
}

TEST(NormRopeOnGpu, AsFp64Loops) {
  if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  for (const NormRopeCase& one : norm_rope_cases()) {
    expect_right_on_gpu(one, 7);
    if (HasFatalFailure()) return;
  }
}

// Rows of the shape that it is written for.
TEST(NormRopeOnGpu, OfFlux) {
  if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  NormRopeCase flux;
  flux.heads = 24;
  flux.d = 128;
  flux.tokens = {32, 64};
  expect_right_on_gpu(flux, 8);
}

}  // namespace
}  // namespace dspattn
