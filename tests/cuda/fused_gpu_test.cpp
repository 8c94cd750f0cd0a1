// Every row of the fused forward on a GPU: random problems of the whole contract against the oracle and beside the CPU
// kernel, and reruns bit for bit. Skipped without a Hopper GPU.
//
// The oracle, in fp64 on the CPU, takes nearly all of the time, so problems are checked by as many threads as there are
// cores; they share the GPU's default stream.
//   DSPATTN_FUSED_CASES   problems per row (default 40; 300 for the full check; below 20, as under compute-sanitizer,
//                         only short ones)
//   DSPATTN_FUSED_SEED    what they are drawn from (default 7)
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check/check.h"
#include "cuda/device/device.h"
#include "cuda/sm90/common/forward.h"
#include "cuda/sm90/forward/rows.h"
#include "cuda/tile/head_dims.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace {

std::int64_t from_environment(const char* name, std::int64_t otherwise) {
  const char* given = std::getenv(name);
  return given != nullptr ? std::max(1LL, std::atoll(given)) : otherwise;
}

// A row of the table by its name: sm90_fused_2_4_bf16_d64.
struct Row {
  std::string name;
  DType dtype;
  Pattern pattern;
  std::int64_t dim, dim_above;  // serves problems whose larger head dim is in (dim_above, dim]

  explicit Row(const std::string& of) : name(of) {
    dtype = of.find("bf16") != std::string::npos ? DType::bf16 : DType::f16;
    pattern = of.find("_2_4_") != std::string::npos ? Pattern{2, 4} : Pattern{1, 2};
    dim = std::stoi(of.substr(of.rfind('d') + 1));
    dim_above = cuda::tile::head_dim_below(static_cast<int>(dim));
  }
};

check::CheckOptions options_of(const Row& row, std::int64_t index, bool short_only) {
  check::CheckOptions options;
  options.device = {DeviceType::cuda, 0};
  options.beside_cpu = true;
  options.limits.pass = Pass::forward;
  options.limits.dtype = row.dtype;
  options.limits.pattern = row.pattern;
  options.limits.choice = Choice::each_head;
  // Half of the problems at the row's own head dim, the others at whatever is drawn and the row serves.
  if (index % 2 == 0) options.limits.head_dim = row.dim;
  // Half of the problems are short; of the long ones most have few heads or few rows, and some are long both ways. The
  // limits keep the oracle's time near 10 ms (short), 0.1 s and, for one in 16, a few seconds.
  if (index % 4 >= 2 && !short_only) {
    options.limits.max_n = 2049;
    options.limits.max_work = index % 16 == 2 ? 1'200'000'000 : 60'000'000;
  }
  return options;
}

// What the row says it takes: its head dims, results in the inputs' type, scales that fp16 inputs can be multiplied by.
bool takes(const Row& row, const check::Case& drawn) {
  const std::int64_t dim = std::max(drawn.d, drawn.d_v);
  return dim > row.dim_above && dim <= row.dim && !drawn.fp32_results &&
         (!drawn.scale || row.dtype != DType::f16 ||
          (*drawn.scale >= cuda::sm90::kLeastFp16Scale && *drawn.scale < cuda::sm90::kFp16ScaleEnd));
}

class FusedRow : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const cuda::DeviceFacts& device = cuda::device_facts(0);
    if (!device.present || device.major != 9) {
      GTEST_SKIP() << "needs a Hopper GPU: " << (device.present ? "another architecture" : device.absence);
    }
  }
};

// What the problems of a row showed, all together.
struct Tally {
  std::mutex mutex;
  std::int64_t served = 0, failed = 0, near_ties = 0, rows_beside_cpu = 0;
  double worst = 0;

  void add(const check::CaseReport& report) {
    constexpr std::int64_t kFailuresPrinted = 5;
    const std::lock_guard lock(mutex);
    ++served;
    near_ties += report.near_ties;
    rows_beside_cpu += report.rows_beside_cpu;
    worst = std::max(worst, report.worst);
    if (report.passed() || ++failed > kFailuresPrinted) return;
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << report.description << "\n" << failure << "\n" << report.command;
    }
  }
};

// As many problems as DSPATTN_FUSED_CASES says, drawn with `limited` options.
template <typename Limited>
void expect_agreement(const Row& row, Limited limited) {
  const std::int64_t wanted = from_environment("DSPATTN_FUSED_CASES", 40);
  const auto seed = static_cast<std::uint64_t>(from_environment("DSPATTN_FUSED_SEED", 7));
  std::atomic<std::int64_t> next{0}, taken{0};
  Tally tally;
  const auto work = [&] {
    for (std::int64_t index = next++; taken < wanted && index < 100 * wanted; index = next++) {
      const check::CheckOptions options = limited(index, wanted < 20);
      if (!takes(row, check::draw_case(seed, index, options.limits))) continue;
      if (taken++ >= wanted) break;
      const check::CaseReport report = check::check_case(seed, index, row.name, options);
      if (report.served) {
        tally.add(report);
      } else {
        ADD_FAILURE() << report.description << "\nnot served: " << report.reasons.front() << "\n" << report.command;
      }
    }
  };
  {
    std::vector<std::jthread> workers;
    for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) workers.emplace_back(work);
  }
  std::cout << row.name << ": " << tally.served << " problems, " << tally.failed << " failed; " << tally.near_ties
            << " near-ties; " << tally.rows_beside_cpu << " rows beside the CPU's; largest error " << tally.worst
            << " of what is allowed\n";
  EXPECT_EQ(tally.served, wanted);
  EXPECT_EQ(tally.failed, 0);
  EXPECT_GT(tally.rows_beside_cpu, 0);
}

TEST_P(FusedRow, AgreesWithTheOracleAndTheCpuOnRandomProblems) {
  const Row row(GetParam());
  expect_agreement(row, [&](std::int64_t index, bool short_only) { return options_of(row, index, short_only); });
}

// All of them with rest = mean; none takes the oracle seconds.
TEST_P(FusedRow, AgreesOnRandomMeans) {
  const Row row(GetParam());
  expect_agreement(row, [&](std::int64_t index, bool short_only) {
    check::CheckOptions options = options_of(row, index, short_only);
    options.limits.rest = Rest::mean;
    options.limits.max_work = std::min<std::int64_t>(options.limits.max_work, 20'000'000);
    return options;
  });
}

// `wanted` problems of a rest, long enough for many tiles and items on every multiprocessor, run 100 times more.
void expect_same_bits(const Row& row, Rest rest, int wanted, std::int64_t max_work) {
  int checked = 0;
  for (std::int64_t index = 0; checked < wanted && index < 1000; ++index) {
    check::CheckOptions options;
    options.device = {DeviceType::cuda, 0};
    options.limits.pass = Pass::forward;
    options.limits.dtype = row.dtype;
    options.limits.pattern = row.pattern;
    options.limits.choice = Choice::each_head;
    options.limits.rest = rest;
    options.limits.head_dim = row.dim;
    options.limits.max_n = 1025;
    options.limits.max_work = max_work;
    options.reruns = 100;
    const check::Case drawn = check::draw_case(11, index, options.limits);
    if (drawn.batch * drawn.heads * drawn.n_q < 500 || drawn.n_k < 300 || !takes(row, drawn)) continue;
    const check::CaseReport report = check::check_case(11, index, row.name, options);
    ASSERT_TRUE(report.served) << report.description;
    ++checked;
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << report.description << "\n" << failure << "\n" << report.command;
    }
  }
  EXPECT_EQ(checked, wanted);
}

TEST_P(FusedRow, GivesTheSameBitsOverAHundredReruns) { expect_same_bits(Row(GetParam()), Rest::drop, 4, 300'000'000); }
TEST_P(FusedRow, GivesTheSameMeansOverAHundredReruns) { expect_same_bits(Row(GetParam()), Rest::mean, 3, 150'000'000); }

std::vector<std::string> row_names() {
  std::vector<std::string> names;
  for (const core::KernelRow& row : cuda::sm90::fused_rows()) names.emplace_back(row.info.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Table, FusedRow, ::testing::ValuesIn(row_names()),
                         [](const ::testing::TestParamInfo<std::string>& row) { return row.param; });

}  // namespace
}  // namespace dspattn
