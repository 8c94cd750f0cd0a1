// The fused forward with rest = mean where it writes the means of V itself (blocks/means_writer.h): the table, entry by
// entry, in a workspace that held anything before, also for the launches of a graph; results against the oracle. And
// where a kernel before writes it, what both have in common.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check/case_data.h"
#include "check/check.h"
#include "check/random.h"
#include "cuda/blocks/means.h"
#include "cuda/blocks/means_plan.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/fused_rows.h"
#include "cuda/sm90/forward/plan.h"
#include "cuda/sm90/forward/rows.h"
#include "dspattn/attention.h"

namespace dspattn {
namespace {

using check::Case;

struct Shape {
  std::int64_t batch, heads, kv_heads, n_q, n_k, d_v;
  bool causal;
};

class MeansRow : public Robust {
 protected:
  Case problem(const Shape& shape) const {
    Case drawn = row().problem(shape.heads, shape.n_q, shape.n_k);
    drawn.kv_heads = shape.kv_heads;
    drawn.batch = shape.batch;
    drawn.causal = shape.causal;
    drawn.d_v = shape.d_v;
    drawn.rest = Rest::mean;
    return drawn;
  }
  check::Tensor tensor(std::array<std::int64_t, 4> shape) const {
    return {gpu_memory(), check::laid_out(row().dtype, shape, check::Layout::bhnd)};
  }
  cuda::sm90::ForwardKernel kernel() const {
    const Row of = row();
    return {of.dtype,
            of.pattern.group == 4 ? cuda::blocks::Selection::two_of_four : cuda::blocks::Selection::one_of_two,
            static_cast<int>(of.dim)};
  }
};

// A problem whose V are small integers, so that sums of them are exact in any order.
struct Integers {
  check::Tensor q, k, v, out;
  ForwardArgs args;
  cuda::sm90::ForwardPlan plan;
  core::DeviceBuffer workspace;

  Integers(check::Tensor own_q, check::Tensor own_k, check::Tensor own_v, check::Tensor own_out, const Row& of,
           const cuda::sm90::ForwardKernel& kernel, bool causal)
      : q(std::move(own_q)), k(std::move(own_k)), v(std::move(own_v)), out(std::move(own_out)) {
    check::Random random(7, 3);
    for (check::Tensor* input : {&q, &k}) {
      input->fill([&](auto...) { return random.bell(); });
      input->upload();
    }
    v.fill([&](std::int64_t, std::int64_t, std::int64_t key, std::int64_t column) {
      return static_cast<double>((key * 7 + column * 3) % 17 - 8 + random.below(5));
    });
    v.upload();
    args.problem.device = kGpu;
    args.problem.q = q.device_view();
    args.problem.k = k.device_view();
    args.problem.v = v.device_view();
    args.problem.mask.causal = causal;
    args.problem.pattern = of.pattern;
    args.problem.rest = Rest::mean;
    args.out = out.device_view();
    args.run.kernel = of.name;
    plan = plan_forward(kernel, args.problem, args.out, cuda::device_facts(0));
    workspace = core::DeviceBuffer(gpu_memory(), plan.workspace_bytes);
    args.run.workspace = workspace.data();
    args.run.workspace_bytes = workspace.bytes();
  }
  void put_garbage(std::uint8_t byte) {
    const std::vector<std::uint8_t> garbage(workspace.bytes(), byte);
    workspace.upload(garbage.data());
  }
  std::vector<std::byte> run() {
    out.poison();
    out.upload();
    forward(args);
    out.download();
    return out.bytes();
  }
  std::vector<float> table() const {
    std::vector<std::byte> bytes(workspace.bytes());
    workspace.download(bytes.data());
    std::vector<float> floats(static_cast<std::size_t>(plan.means.heads * plan.means.table.entries) *
                              static_cast<std::size_t>(plan.means.columns));
    std::memcpy(floats.data(), bytes.data() + plan.means.begin, floats.size() * sizeof(float));
    return floats;
  }
};

class OwnMeans : public MeansRow {
 protected:
  Integers integers(const Shape& shape) const {
    const Row of = row();
    return {tensor({shape.batch, shape.heads, shape.n_q, of.dim}),
            tensor({shape.batch, shape.kv_heads, shape.n_k, of.dim}),
            tensor({shape.batch, shape.kv_heads, shape.n_k, shape.d_v}),
            tensor({shape.batch, shape.heads, shape.n_q, shape.d_v}),
            of,
            kernel(),
            shape.causal};
  }
};

// Every entry: sums of small integers are exact, and the mean is off by what a reciprocal is.
void expect_table(const Integers& made, const Shape& shape, const std::string& what) {
  const cuda::tile::MeanTable& table = made.plan.means.table;
  const std::vector<float> means = made.table();
  const auto mean_at = [&](std::int64_t head, std::int64_t entry, std::int64_t column) {
    return means[static_cast<std::size_t>((head * table.entries + entry) * made.plan.means.columns + column)];
  };
  std::int64_t wrong = 0;
  for (int sequence = 0; sequence < shape.batch; ++sequence) {
    for (std::int64_t head = 0; head < shape.kv_heads; ++head) {
      for (std::int64_t column = 0; column < made.plan.means.columns; ++column) {
        double sum = 0;
        for (std::int64_t key = 0; key < shape.n_k; ++key) {
          sum += column < shape.d_v ? made.v.at(sequence, head, key, column) : 0;
          const auto count = static_cast<int>(key + 1);
          const bool ends_block = count % cuda::tile::kBlockKeys == 0;
          if (!ends_block && count > table.first_keys) continue;
          if (ends_block && !shape.causal && count < shape.n_k) continue;
          const int entry = ends_block ? table.entry_of_blocks({sequence, 0, 0}, {0, count / cuda::tile::kBlockKeys})
                                       : table.edge_of({sequence, 0, 0}) + count - 1;
          const double mean = sum / count;
          const float seen = mean_at(head, entry, column);
          if (!(std::abs(seen - mean) <= 1e-6 * std::abs(mean))) ++wrong;
        }
      }
    }
  }
  EXPECT_EQ(wrong, 0) << what;
}

// Over what memory holds, and over what the launch before has left.
TEST_P(OwnMeans, TableInAnyWorkspace) {
  const std::int64_t dim = row().dim;
  for (const Shape& shape : {Shape{1, 1, 1, 512, 512, dim, false}, Shape{2, 4, 2, 256, 512, dim, true},
                             Shape{1, 4, 1, 130, 640, dim - 8, true}}) {
    Integers made = integers(shape);
    // The table of a kernel before must be as right.
    ASSERT_EQ(made.plan.means.own, made.plan.variant != cuda::sm90::Variant::wide) << to_string(made.plan);
    std::vector<std::byte> first;
    for (const int garbage : {0xFF, 0x00, 0x7F}) {
      made.put_garbage(static_cast<std::uint8_t>(garbage));
      const std::vector<std::byte> bits = made.run();
      expect_table(made, shape, to_string(made.plan));
      if (first.empty()) first = bits;
      EXPECT_TRUE(bits == first);
    }
    EXPECT_TRUE(made.run() == first) << "over what the launch before has left";
  }
}

// A graph's launches have the same parameters every time.
TEST_P(OwnMeans, LaunchesOfAGraph) {
  Integers made = integers({1, 2, 1, 256, 512, row().dim, true});
  made.put_garbage(0xA5);
  const std::vector<std::byte> alone = made.run();
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  made.args.run.stream = stream;
  forward(made.args);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int i = 0; i < 3; ++i) {
    made.v.set(i, 0, 0, 5 + i, 3);  // another table every time
    made.v.upload();
    made.out.poison();
    made.out.upload();
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    made.out.download();
    EXPECT_FALSE(made.out.is_poisoned(0, 1, 255, row().dim - 1));
    expect_table(made, {1, 2, 1, 256, 512, row().dim, true}, "launch " + std::to_string(i));
    EXPECT_FALSE(made.out.bytes() == alone);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// The bits of the kernel before, with 64 columns a CTA: it has so many where heads are many, here all the same one.
TEST_P(OwnMeans, BitsOfTheKernelBefore) {
  constexpr int kHeads = 512;
  for (const bool causal : {false, true}) {
    Integers made = integers({1, 1, 1, 512, 640, row().dim, causal});
    if (!made.plan.means.own) continue;
    check::Random random(11, 5);
    made.v.fill([&](auto...) { return random.bell(); });
    made.v.upload();
    made.put_garbage(0);
    made.run();
    const std::vector<float> own = made.table();
    core::DeviceBuffer before(gpu_memory(), kHeads * own.size() * sizeof(float));
    std::vector<float> floats(kHeads * own.size());
    before.upload(floats.data());
    cuda::blocks::MeansParams params = cuda::blocks::means_params_of(
        made.plan.means, made.args.problem, cuda::blocks::work_of(made.args.problem), before.data());
    params.heads = kHeads;
    params.v.head_stride = 0;
    params.means = static_cast<float*>(before.data());
    ASSERT_TRUE(cuda::blocks::has_plain_rows(params));
    cuda::blocks::launch_plain_prefix_means(params, nullptr);
    before.download(floats.data());
    for (std::size_t i = 0; i < own.size(); ++i) {
      ASSERT_EQ(floats[i], own[i]) << i << (causal ? ", causal" : "");
    }
    EXPECT_EQ(std::memcmp(floats.data(), floats.data() + 511 * own.size(), own.size() * sizeof(float)), 0);
  }
}

// NaN in V of a block reaches rows that see the block and no others.
TEST_P(OwnMeans, HiddenNanReachesNothing) {
  Integers made = integers({1, 1, 1, 512, 512, row().dim, true});
  made.put_garbage(0xFF);
  made.run();
  std::vector<double> plain;
  for (std::int64_t query = 0; query < 512; ++query) {
    for (std::int64_t column = 0; column < row().dim; ++column) plain.push_back(made.out.at(0, 0, query, column));
  }
  constexpr std::int64_t kNanKey = 300;
  for (std::int64_t column = 0; column < row().dim; ++column) {
    made.v.set(std::numeric_limits<double>::quiet_NaN(), 0, 0, kNanKey, column);
  }
  made.v.upload();
  made.run();
  for (std::int64_t query = 0; query < 256; ++query) {  // rows that see no key of its block
    for (std::int64_t column = 0; column < row().dim; ++column) {
      const double before = plain[static_cast<std::size_t>(query * row().dim + column)];
      ASSERT_EQ(made.out.at(0, 0, query, column), before) << query << ", " << column;
    }
  }
  EXPECT_TRUE(std::isnan(made.out.at(0, 0, 511, 0)));
}

TEST_P(OwnMeans, AgreesWithTheOracle) {
  const std::int64_t dim = row().dim;
  expect_right(problem({1, 2, 1, 256, 512, dim, true}), false);
  expect_right(problem({1, 4, 1, 130, 640, dim, false}), false);
}

// More items than CTAs: heads that are taken in later rounds, whose means others have written.
TEST_P(OwnMeans, MoreItemsThanCtas) {
  const std::int64_t heads = cuda::device_facts(0).multiprocessors / 2 + 1;
  expect_as_few_at_a_time(problem({1, heads, heads, 512, 512, row().dim, false}), false);
}

// Problems whose table a kernel before writes: ragged lengths, packed batches.
TEST_P(OwnMeans, OthersHaveAKernelBefore) {
  const std::int64_t dim = row().dim;
  EXPECT_FALSE(integers({1, 1, 1, 520, 520, dim, true}).plan.means.own);
  Case packed = problem({3, 2, 2, 260, 520, dim, true});
  packed.packed = true;
  packed.cu_q = {0, 260, 261, 300};
  packed.cu_k = {0, 520, 530, 658};
  expect_right(packed, false);
}

INSTANTIATE_TEST_SUITE_P(Table, OwnMeans,
                         ::testing::Values("sm90_fused_2_4_bf16_d64", "sm90_fused_1_2_bf16_d64",
                                           "sm90_fused_2_4_bf16_d128", "sm90_fused_1_2_fp16_d128"),
                         name_of<std::string>);

}  // namespace
}  // namespace dspattn
