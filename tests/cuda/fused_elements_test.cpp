// The fused forward on inputs that are set element by element: which results an infinity or a NaN must reach and which
// not, and graph capture.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "check/case_data.h"
#include "check/check.h"
#include "check/random.h"
#include "cpu/reference.h"
#include "cuda/fused_rows.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace {

using check::Layout;
using check::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

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
  for (const double key_value : {kNaN, kInfinity}) {
    for (std::size_t spoilt_sequence = 0; spoilt_sequence + 1 < ends.size(); ++spoilt_sequence) {
      Chosen spoilt(row(), 431, 431);
      spoilt.ends = ends;
      for (std::int64_t key = ends[spoilt_sequence]; key < ends[spoilt_sequence + 1]; ++key) {
        for (std::int64_t c = 0; c < row().dim; ++c) {
          spoilt.k.set(key_value, 0, 0, key, c);
          spoilt.v.set(kInfinity, 0, 0, key, c);
        }
      }
      spoilt.run();
      const std::vector<double> found = spoilt.result();
      for (std::size_t i = 0; i < found.size(); ++i) {
        const auto query = static_cast<std::int64_t>(i) / row().dim;
        const bool own = query >= ends[spoilt_sequence] && query < ends[spoilt_sequence + 1];
        const bool spoils = std::isnan(key_value) ? std::isnan(found[i]) : !std::isfinite(found[i]);
        ASSERT_TRUE(own ? spoils : found[i] == clean[i]) << "query " << query;
      }
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

}  // namespace
}  // namespace dspattn
