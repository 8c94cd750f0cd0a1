// What several kernels refuse: at the last value that is taken nothing is said, at the next one the argument, what is
// taken and what was given.
#include "cuda/blocks/refusals.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/tile/walk.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::blocks {
namespace {

// What `refuse` says of something.
template <typename Refuse>
std::vector<std::string> said(Refuse refuse) {
  core::Refusals refusals(core::Refusals::Text::wanted);
  refuse(refusals);
  return refusals.reasons();
}

using Reasons = std::vector<std::string>;

Problem problem_of(std::int64_t n_q, std::int64_t n_k) {
  auto* stand_in = reinterpret_cast<void*>(std::uintptr_t{1} << 12);  // never read
  Problem p;
  p.q = {stand_in, DType::bf16, {1, 2, n_q, 64}};
  p.k = {stand_in, DType::bf16, {1, 2, n_k, 64}};
  p.v = {stand_in, DType::bf16, {1, 2, n_k, 64}};
  return p;
}

TEST(Refusals, Devices) {
  const DeviceFacts absent{.absence = "no driver"}, ampere{.present = true, .major = 8, .minor = 6};
  const auto of = [](const DeviceFacts& device, bool serves) {
    return said([&](core::Refusals& r) { refuse_device(device, serves, "9.0 (Hopper)", r); });
  };
  EXPECT_EQ(of(ampere, true), Reasons{});
  EXPECT_EQ(of(ampere, false), Reasons{"device: needs compute capability 9.0 (Hopper), got 8.6"});
  EXPECT_EQ(of(absent, false), Reasons{"device: no driver"});
}

TEST(Refusals, TypesAndHeadDims) {
  const Problem p = problem_of(3, 5);
  EXPECT_EQ(said([&](core::Refusals& r) { refuse_type(DType::bf16, p, r); }), Reasons{});
  EXPECT_EQ(said([&](core::Refusals& r) { refuse_type(DType::f16, p, r); }), Reasons{"q: takes fp16, got bf16"});
  const auto of = [&](int above, int most) {
    return said([&](core::Refusals& r) { refuse_dims(above, most, core::geometry_of(p), r); });
  };
  EXPECT_EQ(of(0, 64), Reasons{});
  EXPECT_EQ(of(63, 64), Reasons{});
  EXPECT_EQ(of(64, 128), Reasons{"d, d_v: takes a larger of 65 to 128, got 64"});
  EXPECT_EQ(of(0, 63), Reasons{"d, d_v: takes a larger of 1 to 63, got 64"});
}

TEST(Refusals, RowsAndPages) {
  const auto rows = [](const Problem& p) {
    return said([&](core::Refusals& r) { refuse_rows(p, core::geometry_of(p), r); });
  };
  const std::string most = std::to_string(tile::kMaxRows), more = std::to_string(tile::kMaxRows + 1);
  EXPECT_EQ(rows(problem_of(3, tile::kMaxRows)), Reasons{});
  EXPECT_EQ(rows(problem_of(3, tile::kMaxRows + 1)), Reasons{"n_q, n_k: takes up to " + most + ", got " + more});
  EXPECT_EQ(rows(problem_of(tile::kMaxRows + 1, 3)), Reasons{"n_q, n_k: takes up to " + most + ", got " + more});

  Problem paged = problem_of(3, 16);
  const auto pages = [&] { return said([&](core::Refusals& r) { refuse_pages(paged, r); }); };
  paged.k.shape[0] = tile::kMaxRows + 1;
  EXPECT_EQ(pages(), Reasons{});  // a batch
  paged.block_table = {paged.q.data, DType::i32, {1, 4}};
  EXPECT_EQ(pages(), Reasons{"k.shape[0]: takes up to " + most + " pages, got " + more});
}

TEST(Refusals, Masks) {
  Mask mask;
  const auto offset = [&] { return said([&](core::Refusals& r) { refuse_offset(mask, r); }); };
  mask.offset = -(tile::kMaxRows / 2 + 1);
  EXPECT_EQ(offset(), Reasons{});  // no diagonal
  mask.causal = true;
  EXPECT_EQ(offset(), Reasons{"mask.offset: takes up to " + std::to_string(tile::kMaxRows / 2) + " either way, got " +
                              std::to_string(mask.offset)});
  mask.offset = tile::kMaxRows / 2;
  EXPECT_EQ(offset(), Reasons{});

  auto* stand_in = reinterpret_cast<void*>(std::uintptr_t{1} << 12);
  mask.bias = {stand_in, DType::f32, {1, 1, 1, 7}};
  const auto strides = [&](std::int64_t most) {
    return said([&](core::Refusals& r) { refuse_key_strides(mask, most, r); });
  };
  mask.bias.stride[3] = -100;
  EXPECT_EQ(strides(100), Reasons{});
  EXPECT_EQ(strides(99), Reasons{"bias: takes a stride along the keys of up to 99, got -100"});
}

}  // namespace
}  // namespace dspattn::cuda::blocks
