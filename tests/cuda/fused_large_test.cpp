// The fused forward on large problems: a million keys, 65,536 heads, more than 2^31 elements, strides past 2^31, all
// multiprocessors busy with short items.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check/case_data.h"
#include "check/check.h"
#include "check/random.h"
#include "check/tolerance.h"
#include "core/half.h"
#include "cpu/reference.h"
#include "cuda/fused_rows.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace {

using check::Case;
using check::Tensor;

TEST_P(RobustLarge, AMillionKeysForOneQuery) {
  Case drawn = row().problem(2, 1, 1'000'003);
  drawn.integers = true;  // the selection is exact, so it need not be asked for: that takes a run per few keys
  drawn.scale = 0.125;
  const check::CaseData data(drawn, kGpu, gpu_memory());
  Tensor out = data.output_like_q(drawn.d_v);
  Tensor lse = data.lse_output();
  ForwardArgs args;
  args.problem = data.device_problem();
  args.out = out.device_view();
  args.lse = lse.device_view();
  args.run.kernel = GetParam();
  forward(args);
  out.download();
  lse.download();
  const cpu::Reference oracle = cpu::reference_forward(data.host_problem());
  const check::ForwardTolerance tolerance = check::forward_tolerance(data, oracle);
  for (std::int64_t h = 0; h < drawn.heads; ++h) {
    const auto at = static_cast<std::size_t>(h);
    EXPECT_NEAR(lse.at(0, h, 0), oracle.lse[at], tolerance.lse[at]);
    for (std::int64_t c = 0; c < drawn.d_v; ++c) {
      const std::size_t element = at * static_cast<std::size_t>(drawn.d_v) + static_cast<std::size_t>(c);
      EXPECT_NEAR(out.at(0, h, 0, c), oracle.out[element], tolerance.out[element]) << "head " << h << " column " << c;
    }
  }
}

TEST_P(RobustLarge, ManyHeads) {
  Case drawn = row().problem(65536, 3, 5);
  drawn.causal = true;
  expect_right(drawn);
}

// Bytes of q, k, v and the output of one head, and of several heads end to end.
struct Heads {
  std::vector<std::uint16_t> q, k, v;  // [count, n, d]
  std::int64_t count, n, d;

  Heads(DType dtype, std::int64_t how_many, std::int64_t length, std::int64_t dim)
      : count(how_many), n(length), d(dim) {
    check::Random random(3, 1);
    for (std::vector<std::uint16_t>* tensor : {&q, &k, &v}) {
      tensor->resize(static_cast<std::size_t>(elements()));
      for (std::int64_t i = 0; i < elements(); ++i) core::store_element(tensor->data(), dtype, i, random.bell());
    }
  }
  std::int64_t elements() const { return count * n * d; }
};

// Short items on all multiprocessors: Q, keys and results take turns in shared memory as fast as they can. What is read
// too early, or overwritten too early, shows in one of many runs.
TEST_P(RobustBusy, TheSameBitsInEveryRun) {
  for (const auto& [n, causal] : {std::pair<std::int64_t, bool>{256, true}, {512, true}, {256, false}, {512, false}}) {
    const Heads kinds(row().dtype, 64, n, row().dim);
    const std::int64_t head_elements = n * row().dim, heads = 16384 / n * (2048 / row().dim);
    const core::DeviceBuffer q(gpu_memory(), static_cast<std::size_t>(heads * head_elements) * 2);
    const core::DeviceBuffer k(gpu_memory(), q.bytes()), v(gpu_memory(), q.bytes()), out(gpu_memory(), q.bytes());
    const core::DeviceBuffer lse(gpu_memory(), static_cast<std::size_t>(heads * n) * sizeof(float));
    const auto repeat = [&](const core::DeviceBuffer& to, const std::vector<std::uint16_t>& from) {
      for (std::int64_t h = 0; h < heads; h += kinds.count) {
        gpu_memory().copy_in(static_cast<std::uint16_t*>(to.data()) + h * head_elements, from.data(),
                             static_cast<std::size_t>(std::min(kinds.count, heads - h) * head_elements) * 2);
      }
    };
    repeat(q, kinds.q);
    repeat(k, kinds.k);
    repeat(v, kinds.v);
    const auto view = [&, rows = n](const core::DeviceBuffer& buffer) {
      return TensorView(buffer.data(), row().dtype, {1, heads, rows, row().dim});
    };
    ForwardArgs args;
    args.problem.device = kGpu;
    args.problem.pattern = row().pattern;
    args.problem.mask.causal = causal;
    args.problem.q = view(q);
    args.problem.k = view(k);
    args.problem.v = view(v);
    args.out = view(out);
    args.lse = TensorView(lse.data(), DType::f32, {1, heads, n});
    args.run.kernel = GetParam();
    const auto bits = [](const core::DeviceBuffer& buffer) {
      std::vector<std::uint8_t> host(buffer.bytes());
      gpu_memory().copy_out(host.data(), buffer.data(), host.size());
      return host;
    };
    forward(args);
    const std::vector<std::uint8_t> first_out = bits(out), first_lse = bits(lse);
    int different = 0;
    for (int run = 1; run <= 200; ++run) {
      forward(args);
      different += bits(lse) != first_lse || (run % 20 == 0 && bits(out) != first_out) ? 1 : 0;
    }
    EXPECT_EQ(different, 0) << "of 200 runs, n = " << n << (causal ? ", causal" : "");
  }
}

// Runs [batch, heads, n, d] with a batch stride on buffers that start `offset` elements into their allocations.
void run_strided(const Row& row, void* const (&buffers)[4], std::int64_t batch, std::int64_t heads, std::int64_t n,
                 std::int64_t batch_stride) {
  ForwardArgs args;
  args.problem.device = kGpu;
  args.problem.pattern = row.pattern;
  args.problem.mask.causal = true;
  const auto view = [&](void* data) {
    TensorView result(data, row.dtype, {batch, heads, n, row.dim});
    result.stride[0] = batch_stride;
    return result;
  };
  args.problem.q = view(buffers[0]);
  args.problem.k = view(buffers[1]);
  args.problem.v = view(buffers[2]);
  args.out = view(buffers[3]);
  args.run.kernel = row.name;
  forward(args);
}

std::vector<std::uint16_t> download(const std::uint16_t* from, std::int64_t elements) {
  std::vector<std::uint16_t> host(static_cast<std::size_t>(elements));
  gpu_memory().copy_out(host.data(), from, host.size() * 2);
  return host;
}

// The seven heads' results in a small problem of their own.
std::vector<std::uint16_t> small_result(const Row& row, const Heads& heads, std::int64_t offset) {
  std::vector<core::DeviceBuffer> buffers;
  void* data[4];
  for (int i = 0; i < 4; ++i) {
    buffers.emplace_back(gpu_memory(), static_cast<std::size_t>(heads.elements() + offset) * 2);
    data[i] = static_cast<std::uint16_t*>(buffers.back().data()) + offset;
  }
  gpu_memory().copy_in(data[0], heads.q.data(), heads.q.size() * 2);
  gpu_memory().copy_in(data[1], heads.k.data(), heads.k.size() * 2);
  gpu_memory().copy_in(data[2], heads.v.data(), heads.v.size() * 2);
  run_strided(row, data, 1, heads.count, heads.n, heads.elements());
  return download(static_cast<const std::uint16_t*>(data[3]), heads.elements());
}

// 65 * 2048 heads of 7 kinds (seven, because a wrapped offset is a multiple of a power of two): every head must come
// out as its kind does in a small problem, bit for bit.
TEST_P(RobustLarge, MoreThanTwoToThe31Elements) {
  const std::int64_t batch = 65, heads = 2048, kinds = 7;
  const Heads kind(row().dtype, kinds, 256 * 64 / row().dim, row().dim);
  const std::int64_t head_elements = kind.n * kind.d, total = batch * heads;
  ASSERT_GT(total * head_elements, std::int64_t{1} << 31);
  const std::vector<std::uint16_t> expected = small_result(row(), kind, 0);
  std::vector<core::DeviceBuffer> buffers;
  void* data[4];
  const std::vector<std::uint16_t>* sources[3] = {&kind.q, &kind.k, &kind.v};
  constexpr std::int64_t kChunk = 7 * 146;  // heads copied at a time
  std::vector<std::uint16_t> chunk(static_cast<std::size_t>(kChunk * head_elements));
  for (int i = 0; i < 4; ++i) {
    buffers.emplace_back(gpu_memory(), static_cast<std::size_t>(total * head_elements) * 2);
    data[i] = buffers.back().data();
    if (i == 3) continue;
    for (std::int64_t h = 0; h < kChunk; h += kinds) {
      std::memcpy(chunk.data() + h * head_elements, sources[i]->data(), sources[i]->size() * 2);
    }
    for (std::int64_t h = 0; h < total; h += kChunk) {
      gpu_memory().copy_in(static_cast<std::uint16_t*>(data[i]) + h * head_elements, chunk.data(),
                           static_cast<std::size_t>(std::min(kChunk, total - h) * head_elements) * 2);
    }
  }
  run_strided(row(), data, batch, heads, kind.n, heads * head_elements);
  std::int64_t wrong = 0;
  for (std::int64_t first = 0; first < total; first += kChunk) {
    const std::int64_t count = std::min(kChunk, total - first);
    const std::vector<std::uint16_t> found =
        download(static_cast<const std::uint16_t*>(data[3]) + first * head_elements, count * head_elements);
    for (std::int64_t h = 0; h < count; ++h) {
      wrong += std::memcmp(found.data() + h * head_elements, expected.data() + (h % kinds) * head_elements,
                           static_cast<std::size_t>(head_elements) * 2) != 0;
    }
  }
  EXPECT_EQ(wrong, 0) << "of " << total << " heads";
}

// A batch stride past 2^31 elements, for the fast variants and (off alignment) the general one.
TEST_P(RobustLarge, StridesBeyondTwoToThe31) {
  const Heads kind(row().dtype, 7, 300, row().dim);
  for (const std::int64_t offset : {0, 3}) {
    const std::vector<std::uint16_t> expected = small_result(row(), kind, offset);
    const std::int64_t stride = (std::int64_t{1} << 31) + 64 * 1000 + offset;
    std::vector<core::DeviceBuffer> buffers;
    void* data[4];
    const std::vector<std::uint16_t>* sources[3] = {&kind.q, &kind.k, &kind.v};
    for (int i = 0; i < 4; ++i) {
      buffers.emplace_back(gpu_memory(), static_cast<std::size_t>(stride + offset + kind.elements()) * 2);
      auto* begin = static_cast<std::uint16_t*>(buffers.back().data()) + offset;
      data[i] = begin;
      if (i == 3) continue;
      for (const std::int64_t at : {std::int64_t{0}, stride}) {
        gpu_memory().copy_in(begin + at, sources[i]->data(), sources[i]->size() * 2);
      }
    }
    run_strided(row(), data, 2, 7, kind.n, stride);
    for (const std::int64_t at : {std::int64_t{0}, stride}) {
      EXPECT_TRUE(download(static_cast<const std::uint16_t*>(data[3]) + at, kind.elements()) == expected)
          << "at element " << at << ", offset " << offset;
    }
  }
}

// With so many row tiles CTAs may work in pairs, under a causal mask too, and the number is odd: one block of
// the last pair has no rows. A few row tiles at a time, without pairs, must give the same bits.
TEST_P(RobustLarge, AnOddNumberOfManyRowTiles) {
  constexpr std::int64_t kHeads = 2, kLength = 65 * 128, kSlice = 5 * 128;
  const Heads heads(row().dtype, kHeads, kLength, row().dim);
  std::vector<core::DeviceBuffer> buffers;
  std::uint16_t* data[5];  // q, k, v, and two outputs
  const std::vector<std::uint16_t>* sources[3] = {&heads.q, &heads.k, &heads.v};
  for (int i = 0; i < 5; ++i) {
    buffers.emplace_back(gpu_memory(), static_cast<std::size_t>(heads.elements()) * 2);
    data[i] = static_cast<std::uint16_t*>(buffers.back().data());
    if (i < 3) gpu_memory().copy_in(data[i], sources[i]->data(), sources[i]->size() * 2);
  }
  const auto run = [&](bool causal, std::uint16_t* out, std::int64_t first, std::int64_t rows) {
    const auto view = [&](std::uint16_t* tensor, std::int64_t from, std::int64_t count) {
      TensorView result(tensor + from * row().dim, row().dtype, {1, kHeads, count, row().dim});
      result.stride[0] = heads.elements();
      result.stride[1] = kLength * row().dim;
      return result;
    };
    const std::int64_t keys = causal ? first + rows : kLength;
    ForwardArgs args;
    args.problem.device = kGpu;
    args.problem.pattern = row().pattern;
    args.problem.mask.causal = causal;
    args.problem.q = view(data[0], first, rows);
    args.problem.k = view(data[1], 0, keys);
    args.problem.v = view(data[2], 0, keys);
    args.out = view(out, first, rows);
    args.run.kernel = row().name;
    forward(args);
  };
  for (const bool causal : {false, true}) {
    run(causal, data[3], 0, kLength);
    for (std::int64_t first = 0; first < kLength; first += kSlice) run(causal, data[4], first, kSlice);
    EXPECT_TRUE(download(data[3], heads.elements()) == download(data[4], heads.elements())) << "causal " << causal;
  }
}

}  // namespace
}  // namespace dspattn
