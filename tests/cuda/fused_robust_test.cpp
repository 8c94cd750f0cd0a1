// The fused forward where problems are at their limits: infinities and NaN, scores of ten thousands, equal scores, one
// key and a million, 65,536 heads, more than 2^31 elements, graph capture. Skipped without a Hopper GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "api/device_memory.h"
#include "check/case_data.h"
#include "check/check.h"
#include "check/random.h"
#include "check/tolerance.h"
#include "core/half.h"
#include "cpu/reference.h"
#include "cuda/device.h"
#include "cuda/sm90/fused/rows.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace {

using check::Case;
using check::Layout;
using check::Tensor;

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

core::DeviceMemory& gpu_memory() { return api::memory_of(kGpu); }

// A row of the table by its name: sm90_fused_2_4_bf16_d64.
struct Row {
  std::string name;
  DType dtype = DType::bf16;
  Pattern pattern{2, 4};
  std::int64_t dim = 0;

  explicit Row(const std::string& of) : name(of) {
    if (of.find("bf16") == std::string::npos) dtype = DType::f16;
    if (of.find("_1_2_") != std::string::npos) pattern = {1, 2};
    dim = std::stoi(of.substr(of.rfind('d') + 1));
  }
  Case problem(std::int64_t heads, std::int64_t n_q, std::int64_t n_k) const {
    Case drawn;
    drawn.seed = 5;
    drawn.dtype = dtype;
    drawn.pattern = pattern;
    drawn.grouping = Grouping::interleaved;
    drawn.heads = drawn.kv_heads = heads;
    drawn.n_q = n_q;
    drawn.n_k = n_k;
    drawn.d = drawn.d_v = dim;
    return drawn;
  }
};

class Robust : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const cuda::DeviceFacts& device = cuda::device_facts(0);
    if (!device.present || device.major != 9) {
      GTEST_SKIP() << "needs a Hopper GPU: " << (device.present ? "another architecture" : device.absence);
    }
  }
  Row row() const { return Row(GetParam()); }

  // The three-part comparison, with aligned tensors (the fast variants) and with tensors off any alignment (the general
  // one), in both groupings.
  void expect_right(Case drawn) const {
    const check::Runner runner = check::library_runner(gpu_memory(), GetParam(), {});
    check::CheckOptions options;
    options.device = kGpu;
    for (const Grouping grouping : {Grouping::interleaved, Grouping::consecutive}) {
      for (const Layout layout : {Layout::bhnd, Layout::padded}) {
        drawn.grouping = grouping;
        drawn.q_layout = drawn.k_layout = drawn.v_layout = drawn.out_layout = layout;
        const check::CaseReport report = check::check_drawn(drawn, runner, options);
        for (const std::string& failure : report.failures) ADD_FAILURE() << report.description << "\n" << failure;
      }
    }
  }
};

class RobustRow : public Robust {};    // every row
class RobustLarge : public Robust {};  // two rows

TEST_P(RobustRow, OneKey) {
  expect_right(row().problem(2, 130, 1));
  Case causal = row().problem(2, 130, 1);
  causal.causal = true;  // only the last query sees it
  expect_right(causal);
}

TEST_P(RobustRow, NoKeys) {
  expect_right(row().problem(2, 130, 0));
  Case hidden = row().problem(2, 130, 200);
  hidden.key_lengths = {0};
  expect_right(hidden);
}

TEST_P(RobustRow, EqualScores) {
  Case drawn = row().problem(2, 40, 261);
  drawn.magnitude = 0;
  expect_right(drawn);
  drawn.causal = true;
  expect_right(drawn);
}

// q times 4096: scores of about +-12,000.
TEST_P(RobustRow, ScoresOfTenThousands) {
  Case drawn = row().problem(2, 70, 261);
  drawn.magnitude = 4096;
  expect_right(drawn);
  drawn.bias = check::Broadcast{};
  drawn.causal = true;
  expect_right(drawn);
}

TEST_P(RobustRow, ScoresOfHundreds) {
  Case drawn = row().problem(2, 70, 261);
  drawn.magnitude = 64;
  expect_right(drawn);
}

// Rows that see nothing but biases of the lowest finite number are not empty. Of fp16's lowest the kernel does not give
// the LSE: it counts scores below -65408 * 2^e as that (docs/fused_kernel.md, limits).
TEST_P(RobustRow, LowestBiases) {
  for (std::int64_t index = 0; index < 4; ++index) {
    Case drawn = row().problem(2, 150, index + 1);
    drawn.index = index;
    drawn.bias = check::Broadcast{};
    drawn.bias_dtype = index % 2 == 0 ? DType::f32 : drawn.dtype;
    drawn.want_lse = drawn.bias_dtype != DType::f16;
    drawn.lowest_bias = true;
    expect_right(drawn);
  }
}

// What lengths drawn at random seldom give: whole blocks of keys, aligned tensors, several items for every thread
// block, and warpgroups of an item that see fewer keys than others, or none.
TEST_P(RobustRow, WholeBlocksAndUnequalWarpgroups) {
  const Row of = row();
  expect_right(of.problem(3, 1, 128));
  Case shared_keys = of.problem(4, 130, 256);
  shared_keys.kv_heads = 2;
  shared_keys.d_v = of.dim - 8;
  expect_right(shared_keys);
  // The diagonal passes between two warpgroups' rows; with a window, on either side.
  Case causal = of.problem(2, 320, 384);
  causal.causal = true;
  expect_right(causal);
  causal.window_left = 70;
  expect_right(causal);
  // The first 320 rows see nothing: whole items, and a warpgroup of the next.
  Case empty = of.problem(2, 576, 256);
  empty.causal = true;
  expect_right(empty);
  // The same with lengths that only the device knows.
  Case lengths = of.problem(1, 192, 384);
  lengths.batch = 5;
  lengths.key_lengths = {384, 0, 128, 250, 64};
  lengths.causal = true;
  expect_right(lengths);
  Case packed = of.problem(2, 320, 256);
  packed.packed = true;
  packed.batch = 4;
  packed.cu_q = {0, 320, 321, 421, 549};
  packed.cu_k = {0, 256, 384, 384, 446};
  packed.causal = true;
  expect_right(packed);
}

// Mask tensors whose rows the copy engine can read, which lengths drawn at random seldom allow, and rows it cannot, in
// every shape. 272 keys end within a block, 70 rows within a warpgroup's.
TEST_P(RobustRow, MaskTensors) {
  constexpr bool kOne = true, kAll = false;
  const check::Broadcast shapes[] = {{{kAll, kAll, kAll, kAll}},
                                     {{kOne, kOne, kAll, kAll}},
                                     {{kOne, kAll, kAll, kAll}},
                                     {{kAll, kOne, kOne, kAll}},
                                     {{kAll, kAll, kAll, kOne}}};
  int index = 0;
  for (const check::Broadcast& shape : shapes) {
    for (const std::int64_t keys : {272, 276, 271}) {
      Case drawn = row().problem(2, 70, keys);
      drawn.index = index++;
      drawn.causal = index % 4 == 0;
      if (index % 3 != 0) drawn.allowed = shape;
      if (index % 3 != 1) drawn.bias = shape;
      drawn.bias_dtype = index % 2 == 0 ? DType::f32 : drawn.dtype;
      expect_right(drawn);
    }
  }
}

// The second warpgroup does not see the first block, and the second block ends within: the warpgroups, the copies of
// the mask tensors and the copy of that block wait for each other in every way there is.
TEST_P(RobustRow, MaskTensorsBesideAWindow) {
  for (std::int64_t index = 0; index < 3; ++index) {
    Case drawn = row().problem(2, 128, 200);
    drawn.index = index;
    drawn.window_left = 5;
    if (index != 1) drawn.allowed = check::Broadcast{};
    if (index != 2) drawn.bias = check::Broadcast{};
    drawn.bias_dtype = DType::f32;
    expect_right(drawn);
  }
}

TEST_P(RobustRow, NaNInQAndK) {
  Case drawn = row().problem(2, 200, 300);
  drawn.nan_in_q = true;
  expect_right(drawn);
  drawn.causal = true;
  drawn.nan_in_k = true;
  expect_right(drawn);
}

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

// A problem whose inputs a test sets element by element: one head, small integers, a scale that is a power of two.
struct Chosen {
  const Row row;
  std::int64_t n_q, n_k;
  Tensor q, k, v, out;
  Problem device_problem, host_problem;
  std::vector<std::int32_t> ends;  // of sequences end to end, from 0 on; empty: one sequence
  core::DeviceBuffer device_ends, space;

  Chosen(const Row& of, std::int64_t queries, std::int64_t keys) : row(of), n_q(queries), n_k(keys) {
    check::Random random(9, 2);
    const auto make = [&](Tensor& tensor, std::int64_t rows, const std::function<double()>& value) {
      tensor = Tensor(gpu_memory(), check::laid_out(row.dtype, {1, 1, rows, row.dim}, Layout::bhnd));
      tensor.fill([&](std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return value(); });
    };
    // Never 0: an infinity times it would be NaN.
    const auto integer = [&] { return static_cast<double>(random.between(1, 2) * (random.chance(50) ? 1 : -1)); };
    make(q, n_q, integer);
    make(k, n_k, integer);
    make(v, n_k, [&] { return random.bell(); });
    make(out, n_q, [] { return 0.0; });
  }
  void run(bool causal = false) {
    for (Tensor* tensor : {&q, &k, &v}) tensor->upload();
    out.poison();
    out.upload();
    const auto set = [&](Problem& problem, bool on_device) {
      const auto view = [&](const Tensor& t) { return on_device ? ConstTensorView(t.device_view()) : t.host_view(); };
      problem.q = view(q);
      problem.k = view(k);
      problem.v = view(v);
      problem.pattern = row.pattern;
      problem.mask.causal = causal;
      problem.mask.alignment = Alignment::top_left;
      problem.scale = 1.0 / 16;
      if (on_device) problem.device = kGpu;
      if (ends.empty()) return;
      const ConstTensorView cumulative(on_device ? device_ends.data() : ends.data(), DType::i32,
                                       {static_cast<std::int64_t>(ends.size())});
      problem.packed = Packed{cumulative, cumulative, n_q, n_k};
    };
    if (!ends.empty()) {
      device_ends = core::DeviceBuffer(gpu_memory(), ends.size() * sizeof ends[0]);
      gpu_memory().copy_in(device_ends.data(), ends.data(), ends.size() * sizeof ends[0]);
    }
    set(device_problem, true);
    set(host_problem, false);
    forward(args());
    out.download();
  }
  // As run() has set it up.
  ForwardArgs args() {
    ForwardArgs result;
    result.problem = device_problem;
    result.out = out.device_view();
    result.run.kernel = row.name;
    const std::size_t bytes = forward_workspace_bytes(result);
    if (bytes > space.bytes()) space = core::DeviceBuffer(gpu_memory(), bytes);
    result.run.workspace = bytes > 0 ? space.data() : nullptr;
    result.run.workspace_bytes = bytes;
    return result;
  }
  std::vector<double> result() const {
    std::vector<double> values;
    for (std::int64_t i = 0; i < n_q; ++i) {
      for (std::int64_t c = 0; c < row.dim; ++c) values.push_back(out.at(0, 0, i, c));
    }
    return values;
  }
};

// A key with an infinite element: its score is +inf for some rows, which then see nothing beside it (a kernel may use
// the clamped score that the contract compares), and -inf for the others, which do not see it at all.
TEST_P(RobustRow, InfinityInK) {
  Chosen problem(row(), 200, 300);
  const std::int64_t key = 130, column = 5;
  problem.k.set(kInfinity, 0, 0, key, column);
  problem.run();
  const cpu::Reference oracle = cpu::reference_forward(problem.host_problem);
  const double allowed = row().dtype == DType::bf16 ? 0x1p-5 : 0x1p-8;  // two units in the last place of values up to 4
  for (std::int64_t i = 0; i < problem.n_q; ++i) {
    for (std::int64_t c = 0; c < row().dim; ++c) {
      const double value = problem.out.at(0, 0, i, c);
      if (problem.q.at(0, 0, i, column) > 0) {
        ASSERT_EQ(value, problem.v.at(0, 0, key, c)) << "row " << i << " column " << c;
      } else {
        ASSERT_NEAR(value, oracle.out[static_cast<std::size_t>(i * row().dim + c)], allowed) << i << " " << c;
      }
    }
  }
}

// What one row of q holds stays in that row of the output. The others may differ in their last bits: an infinite score
// raises the reference of the rows that share its warp, and weights are rounded relative to that.
TEST_P(RobustRow, InfinityAndNaNInQStayInTheirRow) {
  const double allowed = row().dtype == DType::bf16 ? 0x1p-5 : 0x1p-8;  // two units in the last place of values up to 4
  Chosen problem(row(), 200, 300);
  problem.run();
  const std::vector<double> clean = problem.result();
  for (const double value : {kInfinity, -kInfinity, kNaN}) {
    for (const std::int64_t marked : {0, 77, 199}) {
      Chosen spoilt(row(), 200, 300);
      spoilt.q.set(value, 0, 0, marked, 3);
      spoilt.run();
      const std::vector<double> found = spoilt.result();
      for (std::size_t i = 0; i < found.size(); ++i) {
        if (static_cast<std::int64_t>(i) / row().dim == marked) {
          ASSERT_TRUE(!std::isnan(value) || std::isnan(found[i]));
        } else {
          ASSERT_NEAR(found[i], clean[i], allowed) << "row " << static_cast<std::int64_t>(i) / row().dim;
        }
      }
    }
  }
}

// A value that is not finite reaches the rows that keep its key, in its column, and no other element; but for rows in
// which the key's group has fewer visible keys than the pattern keeps (docs/fused_kernel.md, limits).
TEST_P(RobustRow, NotFiniteInV) {
  const std::int64_t key = 200, column = 7;
  for (const bool causal : {false, true}) {
    Chosen problem(row(), 300, 300);
    problem.run(causal);
    const std::vector<double> clean = problem.result();
    const cpu::Reference oracle = cpu::reference_forward(problem.host_problem);
    const std::int64_t group = place_of_key(key, row().pattern.group, Grouping::interleaved).group;
    for (const double value : {kNaN, kInfinity}) {
      Chosen spoilt(row(), 300, 300);
      spoilt.v.set(value, 0, 0, key, column);
      spoilt.run(causal);
      int reached = 0;
      for (std::int64_t i = 0; i < 300; ++i) {
        int visible = 0;
        for (std::int64_t j = 0; j < 300; ++j) {
          visible += place_of_key(j, row().pattern.group, Grouping::interleaved).group == group &&
                     oracle.scores.at(i, j) != -kInfinity;
        }
        const bool keeps = oracle.selection.at(i, key) != 0;
        for (std::int64_t c = 0; c < row().dim; ++c) {
          const double found = spoilt.out.at(0, 0, i, c);
          if (c == column && keeps) {
            ASSERT_FALSE(std::isfinite(found)) << "row " << i;
            ++reached;
          } else if (c != column || visible >= row().pattern.keep || i < 128) {  // key 200 is in the second block
            ASSERT_EQ(found, clean[static_cast<std::size_t>(i * row().dim + c)]) << "row " << i << " column " << c;
          }
        }
      }
      EXPECT_GT(reached, 0);
    }
  }
}

// Blocks of 128 keys are loaded whole, also the last of a sequence: what lies behind its end must not show.
TEST_P(RobustRow, NoSequenceSeesItsNeighbours) {
  const std::vector<std::int32_t> ends = {0, 70, 170, 300, 430, 431};
  Chosen problem(row(), 431, 431);
  problem.ends = ends;
  problem.run();
  const std::vector<double> clean = problem.result();
  for (std::size_t spoilt_sequence = 0; spoilt_sequence + 1 < ends.size(); ++spoilt_sequence) {
    Chosen spoilt(row(), 431, 431);
    spoilt.ends = ends;
    for (std::int64_t key = ends[spoilt_sequence]; key < ends[spoilt_sequence + 1]; ++key) {
      for (std::int64_t c = 0; c < row().dim; ++c) {
        spoilt.k.set(kNaN, 0, 0, key, c);
        spoilt.v.set(kInfinity, 0, 0, key, c);
      }
    }
    spoilt.run();
    const std::vector<double> found = spoilt.result();
    for (std::size_t i = 0; i < found.size(); ++i) {
      const auto query = static_cast<std::int64_t>(i) / row().dim;
      const bool own = query >= ends[spoilt_sequence] && query < ends[spoilt_sequence + 1];
      ASSERT_TRUE(own ? std::isnan(found[i]) : found[i] == clean[i]) << "query " << query;
    }
  }
}

// On a stream of the caller's, captured into a graph: no allocation, no synchronisation, same bits. Long enough for the
// variant with three warpgroups.
TEST_P(RobustRow, RunsFromAGraphOnTheCallersStream) {
  for (const auto& [causal, packed] : {std::pair{false, false}, {true, false}, {false, true}}) {
    Chosen problem(row(), 600, packed ? 600 : 300);
    if (packed) problem.ends = {0, 30, 500, 600};
    problem.run(causal);
    const std::vector<double> expected = problem.result();
    problem.out.poison();
    problem.out.upload();
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    ForwardArgs args = problem.args();
    args.run.stream = stream;
    EXPECT_NO_THROW(forward(args));
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    problem.out.download();
    EXPECT_TRUE(problem.out.is_poisoned(0, 0, 0, 0)) << "ran while it was captured";
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (int i = 0; i < 3; ++i) ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    problem.out.download();
    EXPECT_TRUE(problem.result() == expected);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

std::vector<std::string> row_names() {
  std::vector<std::string> names;
  for (const core::KernelRow& row : cuda::sm90::fused_rows()) names.emplace_back(row.info.name);
  return names;
}

const auto kName = [](const ::testing::TestParamInfo<std::string>& row) { return row.param; };
INSTANTIATE_TEST_SUITE_P(Table, RobustRow, ::testing::ValuesIn(row_names()), kName);
INSTANTIATE_TEST_SUITE_P(Two, RobustLarge, ::testing::Values("sm90_fused_2_4_bf16_d64", "sm90_fused_1_2_fp16_d128"),
                         kName);

}  // namespace
}  // namespace dspattn
