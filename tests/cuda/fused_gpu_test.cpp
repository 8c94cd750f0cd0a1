// Every row of the fused forward on a GPU: random problems of the whole contract against the oracle and beside the CPU
// kernel, and reruns bit for bit (random_problems.h: how many). Skipped without a Hopper GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cuda/random_problems.h"
#include "cuda/sm90/common/variant.h"
#include "cuda/sm90/forward/rows.h"
#include "cuda/tile/head_dims.h"

namespace dspattn {
namespace {

// A row of the table by its name: sm90_fused_2_4_bf16_d64.
struct TableRow {
  std::string name;
  DType dtype;
  Pattern pattern;
  std::int64_t dim, dim_above;  // serves problems whose larger head dim is in (dim_above, dim]

  explicit TableRow(const std::string& row_name) : name(row_name) {
    dtype = row_name.find("bf16") != std::string::npos ? DType::bf16 : DType::f16;
    pattern = row_name.find("_2_4_") != std::string::npos ? Pattern{2, 4} : Pattern{1, 2};
    dim = std::stoi(row_name.substr(row_name.rfind('d') + 1));
    dim_above = cuda::tile::head_dim_below(static_cast<int>(dim));
  }
};

check::CheckOptions options_of(const TableRow& row, std::int64_t index, bool short_only) {
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

// What the row says it takes: its head dims, scales that fp16 inputs can be multiplied by.
bool takes(const TableRow& row, const check::Case& drawn) {
  const std::int64_t dim = std::max(drawn.d, drawn.d_v);
  return dim > row.dim_above && dim <= row.dim &&
         (!drawn.scale || row.dtype != DType::f16 ||
          (*drawn.scale >= cuda::sm90::kLeastFp16Scale && *drawn.scale < cuda::sm90::kFp16ScaleEnd));
}

class FusedRow : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string why = no_hopper(); !why.empty()) GTEST_SKIP() << why;
  }
};

// As many problems as are wanted, drawn with `limited` options.
template <typename Limited>
void expect_row_agrees(const TableRow& row, Limited limited) {
  const auto served = [&](const check::Case& drawn) { return takes(row, drawn); };
  EXPECT_GT(expect_agreement(row.name, row.name, limited, served), 0);
}

TEST_P(FusedRow, AgreesWithTheOracleAndTheCpuOnRandomProblems) {
  const TableRow row(GetParam());
  expect_row_agrees(row, [&](std::int64_t index, bool short_only) { return options_of(row, index, short_only); });
}

// All of them with rest = mean; none takes the oracle seconds.
TEST_P(FusedRow, AgreesOnRandomMeans) {
  const TableRow row(GetParam());
  expect_row_agrees(row, [&](std::int64_t index, bool short_only) {
    check::CheckOptions options = options_of(row, index, short_only);
    options.limits.rest = Rest::mean;
    options.limits.max_work = std::min<std::int64_t>(options.limits.max_work, 20'000'000);
    return options;
  });
}

void expect_row_repeats(const TableRow& row, Rest rest, int wanted, std::int64_t max_work) {
  check::CheckOptions options = options_of(row, 0, true);
  options.beside_cpu = false;
  options.limits.rest = rest;
  options.limits.max_n = 1025;
  options.limits.max_work = max_work;
  options.reruns = 100;
  expect_same_bits(row.name, options, wanted, [&](const check::Case& drawn) { return takes(row, drawn); });
}

TEST_P(FusedRow, GivesTheSameBitsOverAHundredReruns) {
  expect_row_repeats(TableRow(GetParam()), Rest::drop, 4, 300'000'000);
}
TEST_P(FusedRow, GivesTheSameMeansOverAHundredReruns) {
  expect_row_repeats(TableRow(GetParam()), Rest::mean, 3, 150'000'000);
}

INSTANTIATE_TEST_SUITE_P(Table, FusedRow, ::testing::ValuesIn(names_of(cuda::sm90::fused_rows())),
                         name_of<std::string>);

}  // namespace
}  // namespace dspattn
