// Norm and rotation of queries and keys: the CPU against fp64 loops, what is refused, and how a GPU's CTAs share a
// call.
#include "dspattn/norm_rope.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "cuda/norm_rope/plan.h"
#include "norm_rope_cases.h"

namespace dspattn {
namespace {

TEST(NormRope, OnTheCpuAsFp64Loops) {
  for (const NormRopeCase& one : norm_rope_cases()) {
    NormRopeData data(one);
    norm_rope(data.args());
    data.expect_right(data.out);
    if (HasFatalFailure()) return;
  }
}

TEST(NormRope, OfNothing) {
  norm_rope(NormRopeArgs{});
  NormRopeCase empty;
  empty.tokens = {0};
  NormRopeData data(empty);
  norm_rope(data.args());
  EXPECT_EQ(cuda::norm_rope_kernel::plan_of(data.args()).ctas, 0);
}

std::string refusal(const std::function<void(NormRopeArgs&)>& spoil) {
  NormRopeCase one;
  one.tokens = {4, 3};
  NormRopeData data(one);
  NormRopeArgs args = data.args();
  spoil(args);
  try {
    norm_rope(args);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(NormRope, RefusesByName) {
  const struct {
    const char* says;
    std::function<void(NormRopeArgs&)> spoil;
  } wrong[] = {
      {"parts[1].x.dtype: expected bf16 as parts[0].x has, got fp16", [](auto& a) { a.parts[1].x.dtype = DType::f16; }},
      {"parts[0].x.dtype: expected fp32, fp16 or bf16, got int32", [](auto& a) { a.parts[0].x.dtype = DType::i32; }},
      {"parts[1].x.shape[3]: expected 64 as parts[0].x has, got 32", [](auto& a) { a.parts[1].x.shape[3] = 32; }},
      {"parts[0].out.shape: expected [1, 4, 3, 64], got [1, 4, 2, 64]", [](auto& a) { a.parts[0].out.shape[2] = 2; }},
      {"parts[0].x.stride[3]: expected 1", [](auto& a) { a.parts[0].x.stride[3] = 2; }},
      {"parts[0].weight.shape[0]: expected d = 64, got 63", [](auto& a) { a.parts[0].weight.shape[0] = 63; }},
      {"parts[0].weight.dtype: expected bf16 as x has, got fp32",
       [](auto& a) { a.parts[0].weight.dtype = DType::f32; }},
      {"parts[0].weight: expected none without eps, got one", [](auto& a) { a.eps.reset(); }},
      {"eps: expected a finite number >= 0, got -1", [](auto& a) { a.eps = -1; }},
      {"sin: expected both of cos and sin, or neither, got none", [](auto& a) { a.sin = {}; }},
      {"cos.dtype: expected fp32, got bf16", [](auto& a) { a.cos.dtype = DType::bf16; }},
      {"cos.shape[0]: expected a row for each position of parts[1], from 4 on 3, got 6",
       [](auto& a) { a.cos.shape[0] = 6; }},
      {"sin.shape[1]: expected d = 64, got 32", [](auto& a) { a.sin.shape[1] = 32; }},
      {"parts[1].first_position: expected >= 0, got -1", [](auto& a) { a.parts[1].first_position = -1; }},
      {"parts[1].out: expected memory apart from parts[0].out",
       [](auto& a) { a.parts[1].out.data = a.parts[0].out.data; }},
      {"parts[0].out: expected memory apart from parts[0].x", [](auto& a) { a.parts[0].x.data = a.parts[0].out.data; }},
      {"device.index: expected 0 for the CPU, got 1", [](auto& a) { a.device.index = 1; }},
      {"parts: expected at most 8, got 9", [](auto& a) { a.parts.resize(9, a.parts[0]); }},
  };
  for (const auto& [says, spoil] : wrong) EXPECT_NE(refusal(spoil).find(says), std::string::npos) << refusal(spoil);
  const auto odd = [](NormRopeArgs& a) {
    for (NormRopePart& part : a.parts) part.x.shape[3] = part.out.shape[3] = part.weight.shape[0] = 63;
    a.cos.shape[1] = a.sin.shape[1] = 63;
  };
  EXPECT_NE(refusal(odd).find("expected an even head dimension, for rotation, got 63"), std::string::npos);
  const auto wide = [](NormRopeArgs& a) { a.parts[0].x.shape[3] = 257; };
  EXPECT_NE(refusal(wide).find("expected a head dimension up to 256, got 257"), std::string::npos);
}

// Flux's heads: 16 tokens and 8 heads a CTA.
TEST(NormRopePlan, OfFlux) {
  using cuda::norm_rope_kernel::plan_of;
  NormRopeCase flux;
  flux.heads = 24;
  flux.d = 128;
  flux.tokens = {20, 33};
  NormRopeData data(flux);
  const auto plan = plan_of(data.args());
  EXPECT_EQ(plan.params.lanes, 16);
  EXPECT_EQ(plan.ctas, (2 + 3) * 3);
  EXPECT_EQ(plan.params.parts[1].first_cta, 2 * 3);
  EXPECT_TRUE(plan.vector);
  flux.apart = 3;
  NormRopeData unaligned(flux);
  EXPECT_FALSE(plan_of(unaligned.args()).vector);
  flux.apart = 0;
  flux.d = 36;
  NormRopeData narrow(flux);
  EXPECT_FALSE(plan_of(narrow.args()).vector);
  EXPECT_EQ(plan_of(narrow.args()).params.lanes, 8);
}

}  // namespace
}  // namespace dspattn
