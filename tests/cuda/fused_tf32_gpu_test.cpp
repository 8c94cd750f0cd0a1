// Every row of the fused tf32 forward on a GPU: random problems of the whole contract against the oracle and beside the
// CPU kernel, reruns bit for bit (random_problems.h: how many), and inputs that are not kind. Skipped without a Hopper
// GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "api/device_memory.h"
#include "cuda/random_problems.h"
#include "cuda/sm90/forward_tf32/rows.h"
#include "cuda/tile/head_dims.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace {

class FusedTf32Row : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string why = no_hopper(); !why.empty()) GTEST_SKIP() << why;
    dim = std::stoi(GetParam().substr(GetParam().rfind('d') + 1));
    dim_above = cuda::tile::head_dim_below(static_cast<int>(dim));
  }

  check::CheckOptions options_of(std::int64_t index, bool short_only) const {
    check::CheckOptions options;
    options.device = {DeviceType::cuda, 0};
    options.beside_cpu = true;
    options.limits.pass = Pass::forward;
    options.limits.dtype = DType::f32;
    options.limits.pattern = Pattern{1, 2};
    options.limits.rest = Rest::drop;  // what these rows do not serve is not drawn
    options.limits.choice = Choice::each_head;
    // Half of the problems at the row's own head dim, the others at whatever is drawn and the row serves.
    if (index % 2 == 0) options.limits.head_dim = dim;
    // Half of the problems are short; of the long ones some are long both ways.
    if (index % 4 >= 2 && !short_only) {
      options.limits.max_n = 2049;
      options.limits.max_work = index % 16 == 2 ? 1'200'000'000 : 60'000'000;
    }
    return options;
  }

  // The row serves such head dims, and half of all problems ask for products in full fp32.
  bool fits(const check::Case& drawn) const {
    const std::int64_t larger = std::max(drawn.d, drawn.d_v);
    return larger > dim_above && larger <= dim && drawn.fp32_products == Fp32Products::tf32_allowed;
  }

  std::int64_t dim = 0, dim_above = 0;  // serves problems whose larger head dim is in (dim_above, dim]
};

TEST_P(FusedTf32Row, AgreesWithTheOracleAndTheCpuOnRandomProblems) {
  const auto drawn_with = [&](std::int64_t index, bool short_only) { return options_of(index, short_only); };
  const auto served = [&](const check::Case& drawn) { return fits(drawn); };
  EXPECT_GT(expect_agreement(GetParam(), GetParam(), drawn_with, served), 0);
}

TEST_P(FusedTf32Row, GivesTheSameBitsOverAHundredReruns) {
  check::CheckOptions options = options_of(0, true);
  options.limits.max_n = 1025;
  options.limits.max_work = 1'000'000 * dim;
  options.reruns = 100;
  expect_same_bits(GetParam(), options, 4, [&](const check::Case& drawn) { return fits(drawn); });
}

INSTANTIATE_TEST_SUITE_P(Table, FusedTf32Row, ::testing::ValuesIn(names_of(cuda::sm90::fused_tf32_rows())),
                         name_of<std::string>);

// A tensor [1, heads, rows, columns] on the GPU, `shift` elements past an aligned address, rows `padding` wider.
struct OnGpu {
  std::int64_t heads, rows, columns, stride, shift;
  std::vector<float> host;
  core::DeviceBuffer buffer;

  OnGpu(std::int64_t h, std::int64_t n, std::int64_t d, std::int64_t offset = 0, std::int64_t padding = 0)
      : heads(h), rows(n), columns(d), stride(d + padding), shift(offset) {
    host.assign(static_cast<std::size_t>(shift + heads * rows * stride), 0.0f);
    buffer = core::DeviceBuffer(api::memory_of({DeviceType::cuda, 0}), host.size() * sizeof(float));
  }

  float& at(std::int64_t h, std::int64_t i, std::int64_t c) {
    return host[static_cast<std::size_t>(shift + (h * rows + i) * stride + c)];
  }
  void fill(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t c = 0; c < columns; ++c) at(h, i, c) = normal(random);
      }
    }
  }
  void upload() { buffer.upload(host.data()); }
  void download() { buffer.download(host.data()); }
  TensorView view() {
    TensorView result{static_cast<float*>(buffer.data()) + shift, DType::f32, {1, heads, rows, columns}};
    result.stride = {heads * rows * stride, rows * stride, stride, 1};
    return result;
  }
};

struct Tensors {
  OnGpu q, k, v, out, lse;

  Tensors(std::int64_t heads, std::int64_t n_q, std::int64_t n_k, std::int64_t d, std::int64_t shift = 0,
          std::int64_t padding = 0)
      : q(heads, n_q, d, shift, padding),
        k(heads, n_k, d, shift, padding),
        v(heads, n_k, d, shift, padding),
        out(heads, n_q, d, shift, padding),
        lse(heads, n_q, 1) {
    q.fill(1);
    k.fill(2);
    v.fill(3);
  }
  void run(Grouping grouping = Grouping::interleaved) {
    for (OnGpu* tensor : {&q, &k, &v}) tensor->upload();
    ForwardArgs args;
    args.problem.device = {DeviceType::cuda, 0};
    args.problem.q = q.view();
    args.problem.k = k.view();
    args.problem.v = v.view();
    args.problem.pattern = {1, 2};
    args.problem.grouping = grouping;
    args.out = out.view();
    args.lse = TensorView(lse.buffer.data(), DType::f32, {1, lse.heads, lse.rows});
    for (const Verdict& verdict : consider(args.problem, Pass::forward)) {  // few queries have kernels before these
      if (verdict.reasons.empty() && verdict.kernel.name.starts_with("sm90_fused_1_2_fp32")) {
        args.run.kernel = verdict.kernel.name;
      }
    }
    EXPECT_FALSE(args.run.kernel.empty());
    forward(args);
    out.download();
    lse.download();
  }
};

class FusedTf32 : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = no_hopper(); !why.empty()) GTEST_SKIP() << why;
  }
};

// TMA and the threads that copy where it cannot go round alike, and no variant computes otherwise.
TEST_F(FusedTf32, GivesTheSameBitsWhateverTheAlignment) {
  for (const std::int64_t heads : {2, 200}) {  // two and three warpgroups
    for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
      Tensors aligned(heads, 300, 333, 64), shifted(heads, 300, 333, 64, 3, 5);
      aligned.run(grouping);
      shifted.run(grouping);
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < 300; ++i) {
          ASSERT_EQ(aligned.lse.at(h, i, 0), shifted.lse.at(h, i, 0)) << h << " " << i;
          for (std::int64_t c = 0; c < 64; ++c) {
            ASSERT_EQ(aligned.out.at(h, i, c), shifted.out.at(h, i, c)) << h << " " << i << " " << c;
          }
        }
      }
    }
  }
}

TEST_F(FusedTf32, NonFiniteInputsStayInTheirRows) {
  const float kInf = std::numeric_limits<float>::infinity();
  Tensors clean(1, 200, 260, 64), dirty(1, 200, 260, 64);
  dirty.q.at(0, 3, 5) = std::nanf("");
  dirty.q.at(0, 70, 0) = kInf;
  dirty.q.at(0, 199, 63) = -kInf;
  clean.run();
  dirty.run();
  for (std::int64_t i = 0; i < 200; ++i) {
    const bool marked = i == 3 || i == 70 || i == 199;
    for (std::int64_t c = 0; c < 64; ++c) {
      if (marked) {
        ASSERT_TRUE(std::isnan(dirty.out.at(0, i, c))) << i << " " << c;
      } else {
        // Not bit for bit: a NaN makes its warp look again for the scores that weights are relative to.
        ASSERT_NEAR(dirty.out.at(0, i, c), clean.out.at(0, i, c), 2e-3f) << i << " " << c;
      }
    }
  }
}

// Zero scores of either sign, and equal ones: ties keep the lower key.
TEST_F(FusedTf32, EqualScoresKeepTheLowerKey) {
  for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
    Tensors tensors(1, 64, 256, 32);
    for (std::int64_t i = 0; i < 64; ++i) {
      for (std::int64_t c = 0; c < 32; ++c) tensors.q.at(0, i, c) = i % 2 == 0 ? 0.0f : (c == 0 ? 1.0f : -0.0f);
    }
    for (std::int64_t j = 0; j < 256; ++j) {
      for (std::int64_t c = 0; c < 32; ++c) {
        tensors.k.at(0, j, c) = c == 0 ? (j % 3 == 0 ? 0.0f : -0.0f) : (j % 2 == 0 ? 1.0f : -1.0f);
        tensors.v.at(0, j, c) = place_of_key(j, 2, grouping).element == 0 ? 1.0f : 1e6f;
      }
    }
    tensors.run(grouping);
    for (std::int64_t i = 0; i < 64; ++i) {
      for (std::int64_t c = 0; c < 32; ++c) ASSERT_EQ(tensors.out.at(0, i, c), 1.0f) << i << " " << c;
      ASSERT_NEAR(tensors.lse.at(0, i, 0), std::log(128.0f), 1e-6f);
    }
  }
}

// Sequences without a key among others, several items a CTA: what is announced must not wait for itself.
TEST_F(FusedTf32, SequencesWithoutKeysAmongOthers) {
  constexpr std::int64_t kSequences = 900, kRows = 90, kKeys = 200;
  for (const std::int64_t d : {32, 64, 192}) {
    Tensors tensors(kSequences, kRows, kKeys, d);
    for (OnGpu* tensor : {&tensors.q, &tensors.k, &tensors.v}) tensor->upload();
    std::mt19937 random(5);
    std::vector<std::int32_t> lengths;
    for (std::int64_t i = 0; i < kSequences; ++i) {
      lengths.push_back(random() % 2 == 0 ? 0 : static_cast<std::int32_t>(random() % kKeys));
    }
    core::DeviceBuffer on_gpu(api::memory_of({DeviceType::cuda, 0}), lengths.size() * sizeof(std::int32_t));
    on_gpu.upload(lengths.data());
    const auto run = [&](std::int64_t first, std::int64_t count) {
      const auto sequences = [&](OnGpu& tensor) {
        const std::int64_t elements = tensor.rows * tensor.columns;
        return TensorView{static_cast<float*>(tensor.buffer.data()) + first * elements,
                          DType::f32,
                          {count, 1, tensor.rows, tensor.columns}};
      };
      ForwardArgs args;
      args.problem.device = {DeviceType::cuda, 0};
      args.problem.q = sequences(tensors.q);
      args.problem.k = sequences(tensors.k);
      args.problem.v = sequences(tensors.v);
      args.problem.pattern = {1, 2};
      args.problem.mask.key_lengths =
          ConstTensorView(static_cast<std::int32_t*>(on_gpu.data()) + first, DType::i32, {count});
      args.out = sequences(tensors.out);
      args.run.kernel = choose(args.problem, Pass::forward).name;
      forward(args);
    };
    run(0, kSequences);
    tensors.out.download();
    const std::vector<float> together = tensors.out.host;
    for (std::int64_t i = 0; i < kSequences; ++i) run(i, 1);
    tensors.out.download();
    ASSERT_EQ(together, tensors.out.host) << d;
    for (std::int64_t i = 0; i < kSequences; ++i) {
      if (lengths[static_cast<std::size_t>(i)] != 0) continue;
      ASSERT_EQ(tensors.out.at(i, 7, 3), 0.0f);
    }
  }
}

// Scores of +-1e4 that rise from tile to tile, so that the reference is raised again and again.
TEST_F(FusedTf32, LargeScoresThatRise) {
  constexpr std::int64_t kKeys = 1000;
  Tensors tensors(1, 130, kKeys, 64);
  for (std::int64_t i = 0; i < 130; ++i) {
    for (std::int64_t c = 0; c < 64; ++c) tensors.q.at(0, i, c) = c == 0 ? (i % 2 == 0 ? 10.0f : -10.0f) : 0.0f;
  }
  for (std::int64_t j = 0; j < kKeys; ++j) {
    for (std::int64_t c = 0; c < 64; ++c) tensors.k.at(0, j, c) = c == 0 ? static_cast<float>(16 * (j - 500)) : 0.0f;
    for (std::int64_t c = 0; c < 64; ++c) tensors.v.at(0, j, c) = static_cast<float>(j);
  }
  tensors.run();
  for (std::int64_t i = 0; i < 130; ++i) {  // all weight on the last or the first key, itself rounded to tf32
    ASSERT_NEAR(tensors.out.at(0, i, 7), i % 2 == 0 ? 999.0f : 0.0f, 999.0f * 0x1p-11f) << i;
    ASSERT_FLOAT_EQ(tensors.lse.at(0, i, 0), i % 2 == 0 ? 9980.0f : 10000.0f) << i;
  }
}

TEST_F(FusedTf32, AMillionKeysAndOneQuery) {
  constexpr std::int64_t kKeys = 1'000'001;
  Tensors tensors(1, 1, kKeys, 32);
  for (std::int64_t j = 0; j < kKeys; ++j) {
    for (std::int64_t c = 0; c < 32; ++c) {
      tensors.k.at(0, j, c) = 0;
      tensors.v.at(0, j, c) = place_of_key(j, 2, Grouping::interleaved).element == 0 ? 2.0f : 1e6f;
    }
  }
  tensors.run();
  // The last block has 65 keys: its first 64 are first elements.
  const double kept = static_cast<double>(kKeys / 128 * 64 + 64);
  EXPECT_NEAR(tensors.lse.at(0, 0, 0), std::log(kept), 1e-4);
  for (std::int64_t c = 0; c < 32; ++c) EXPECT_NEAR(tensors.out.at(0, 0, c), 2.0f, 1e-3f);
}

TEST_F(FusedTf32, ManyHeads) {
  constexpr std::int64_t kHeads = 65'536;
  Tensors tensors(kHeads, 1, 2, 32);
  tensors.run();
  for (std::int64_t h = 0; h < kHeads; ++h) {
    double dot[2] = {0, 0};
    for (std::int64_t c = 0; c < 32; ++c) {
      for (std::int64_t j = 0; j < 2; ++j) dot[j] += static_cast<double>(tensors.q.at(h, 0, c)) * tensors.k.at(h, j, c);
    }
    // Interleaved pairs lie 64 keys apart: both keys are kept.
    const double scale = 1 / std::sqrt(32.0);
    const double weight = 1 / (1 + std::exp(scale * (dot[1] - dot[0])));
    for (std::int64_t c = 0; c < 32; ++c) {
      const double expected = weight * tensors.v.at(h, 0, c) + (1 - weight) * tensors.v.at(h, 1, c);
      ASSERT_NEAR(tensors.out.at(h, 0, c), expected, 0.02) << h << " " << c;
    }
  }
}

}  // namespace
}  // namespace dspattn
