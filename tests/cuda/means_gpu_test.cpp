// The table of means under windows (cuda/blocks/window_means.cu), every entry that a row reads: beside the mean that
// the contract asks for, in fp64. V is NaN at a few keys, which must reach the means that they belong to and no others,
// and the table holds NaN before.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check/case_data.h"
#include "check/random.h"
#include "cuda/blocks/means.h"
#include "cuda/blocks/means_plan.h"
#include "cuda/blocks/problem_params.h"
#include "cuda/device/device.h"
#include "cuda/fused_rows.h"
#include "cuda/mean_keys.h"

namespace dspattn {
namespace {

using cuda::tile::Keys;

class WindowMeans : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = no_hopper(); !why.empty()) GTEST_SKIP() << why;
  }

  static check::Case problem(std::int64_t n_q, std::int64_t n_k, std::int64_t width, std::int64_t right = 0) {
    check::Case drawn;
    drawn.seed = 3;
    drawn.dtype = DType::bf16;
    drawn.n_q = n_q;
    drawn.n_k = n_k;
    drawn.d = 8;
    drawn.d_v = 64;
    drawn.window_left = width - right - 1;
    drawn.window_right = right;
    drawn.rest = Rest::mean;
    return drawn;
  }

  struct Table {
    cuda::blocks::MeansPlan plan;
    check::Tensor entries;

    float at(std::int64_t head, std::int64_t entry, std::int64_t column) const {
      return static_cast<float>(entries.at(0, 0, head * plan.table.entries + entry, column));
    }
  };

  static Table table_of(const Problem& problem) {
    const cuda::blocks::WorkParams work = cuda::blocks::work_of(problem);
    const auto columns = static_cast<int>((problem.v.extent(3) + 63) / 64 * 64);
    Table table{cuda::blocks::plan_means(problem, work.left, work.right, columns, 0), {}};
    const auto rows = static_cast<std::int64_t>(table.plan.end / (sizeof(float) * static_cast<std::size_t>(columns)));
    table.entries =
        check::Tensor(gpu_memory(), check::laid_out(DType::f32, {1, 1, rows + 1, columns}, check::Layout::bhnd));
    table.entries.poison();
    table.entries.upload();
    const cuda::CurrentDevice device(0);
    cuda::blocks::launch_means(
        cuda::blocks::means_params_of(table.plan, problem, work, table.entries.device_view().data), nullptr);
    table.entries.download();
    return table;
  }

  void expect_means(const check::Case& drawn, const std::vector<std::int64_t>& nan_keys = {}) const {
    const std::string what = check::describe(drawn);
    const check::CaseData data(drawn, kGpu, gpu_memory());
    check::Random random(drawn.seed, 11);
    const std::int64_t lead = drawn.packed ? 1 : drawn.batch, rows = data.v().host_view().extent(2);
    check::Tensor v(gpu_memory(), check::laid_out(drawn.dtype, {lead, drawn.kv_heads, rows, drawn.d_v}, drawn.v_layout),
                    check::offset_of(drawn.v_layout));
    v.fill([&](auto...) { return random.bell(); });
    for (const std::int64_t key : nan_keys) {
      for (std::int64_t c = 0; c < drawn.d_v; ++c) v.set(std::numeric_limits<double>::quiet_NaN(), 0, 0, key, c);
    }
    v.upload();
    Problem problem = data.device_problem();
    problem.v = v.device_view();
    const Table table = table_of(problem);
    EXPECT_TRUE(table_of(problem).entries.bytes() == table.entries.bytes()) << what << ", once more";
    EXPECT_TRUE(table.entries.surroundings_intact()) << what;
    for (std::int64_t i = 0; i < drawn.batch; ++i) expect_sequence(data, v, table, static_cast<int>(i), what);
  }

 private:
  static void expect_sequence(const check::CaseData& data, const check::Tensor& v, const Table& table, int index,
                              const std::string& what) {
    const check::Case& drawn = data.drawn();
    const cuda::blocks::WorkParams work = cuda::blocks::work_of(data.host_problem());
    const auto i = static_cast<std::size_t>(index);
    cuda::tile::MeanTable::Sequence place{index, 0, 0};
    int n_q = work.n_q, n_k = work.n_k;
    if (drawn.packed) {
      place = {index, drawn.cu_k[i], drawn.cu_q[i]};
      n_q = drawn.cu_q[i + 1] - drawn.cu_q[i];
      n_k = drawn.cu_k[i + 1] - drawn.cu_k[i];
    }
    const int diagonal = work.offset + (work.bottom_right != 0 ? n_k - n_q : 0);
    const int length = drawn.key_lengths.empty() ? n_k : drawn.key_lengths[i];
    const cuda::tile::RowBand band{work.left, work.right, diagonal, length};
    const int batch = drawn.packed ? 0 : index;
    Keys last{-1, -1};
    for (int row = 0; row < n_q; ++row) {
      const cuda::tile::KeyInterval seen = cuda::tile::interval_of(band, row);
      const Keys keys = cuda::tile::mean_of(band, row);
      if (seen.end <= seen.begin || keys == last) continue;
      last = keys;
      for (std::int64_t head = 0; head < drawn.kv_heads; ++head) {
        for (std::int64_t column = 0; column < table.plan.columns; column += 21) {
          double sum = 0;  // past the last of V's columns
          for (int key = keys.first; key < keys.second && column < drawn.d_v; ++key) {
            sum += v.at(batch, head, place.k_row + key, column);
          }
          const double mean = sum / (keys.second - keys.first);
          const double found = table.at(head, table.plan.table.entry(place, band, row), column);
          ASSERT_TRUE(std::isnan(mean) ? std::isnan(found) : std::abs(found - mean) <= 1e-5)
              << what << ", sequence " << index << ", head " << head << ", row " << row << ", column " << column << ": "
              << found << " for the mean of keys " << keys.first << " to " << keys.second << ", " << mean;
        }
      }
    }
  }
};

// Windows of every kind of table, causal and to both sides; a NaN in the middle.
TEST_F(WindowMeans, OfEveryWidth) {
  for (const int width : {1, 2, 15, 101, 127, 128, 129, 254, 255, 256, 257, 1024}) {
    expect_means(problem(300, 300, width, width % 3 == 0 ? width / 3 : 0), {150});
  }
  expect_means(problem(1400, 1400, 1024), {5, 1399});
  expect_means(problem(1100, 1100, 1099), {1});
  expect_means(problem(700, 700, 640, 100), {300});
}

// A window in which every row sees the first key is none: the smaller table of rows that see all keys before their
// last.
TEST_F(WindowMeans, OfWindowsThatBoundNothing) {
  const auto entries_of_block = [&](check::Case drawn) {
    expect_means(drawn, {100});
    const check::CaseData data(drawn, kGpu, gpu_memory());
    return table_of(data.device_problem()).plan.table.per_block;
  };
  for (const std::int64_t n : {90, 300}) {
    EXPECT_EQ(entries_of_block(problem(n, 300, 299)), 2);
    EXPECT_EQ(entries_of_block(problem(n, 300, 300)), 1);
    check::Case top_left = problem(n, 400, n);
    top_left.alignment = Alignment::top_left;
    EXPECT_EQ(entries_of_block(top_left), 1);
    top_left.offset = 1;
    EXPECT_EQ(entries_of_block(top_left), 2);
  }
}

// Fewer and more queries than keys, either alignment, rows that see no key at all.
TEST_F(WindowMeans, OfAnyDiagonal) {
  for (const int width : {20, 200, 300}) {
    for (const auto alignment : {Alignment::bottom_right, Alignment::top_left}) {
      for (const auto& [n_q, n_k] : {Keys{140, 420}, Keys{420, 270}, Keys{600, 90}}) {
        check::Case drawn = problem(n_q, n_k, width, 5);
        drawn.alignment = alignment;
        drawn.offset = width == 20 ? -30 : 0;
        expect_means(drawn, {60});
      }
    }
  }
}

// Lengths that the device knows, and sequences end to end: NaN past a sequence's keys reaches nothing.
TEST_F(WindowMeans, OfSequences) {
  for (const int width : {101, 140, 290}) {
    check::Case lengths = problem(420, 300, width);
    lengths.batch = 4;
    lengths.key_lengths = {300, 0, 100, 270};
    lengths.nan_past_length = true;
    lengths.alignment = Alignment::top_left;
    expect_means(lengths, {299, 20});
    check::Case packed = problem(300, 310, width);
    packed.packed = true;
    packed.batch = 4;
    packed.cu_q = {0, 300, 301, 321, 420};
    packed.cu_k = {0, 310, 438, 438, 500};
    expect_means(packed, {309, 310, 437});
  }
}

// Every type, key heads, columns that are no multiple of a panel's, rows off any alignment.
TEST_F(WindowMeans, OfEveryType) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const int width : {50, 200, 260}) {
      check::Case drawn = problem(150, 280, width, 9);
      drawn.dtype = type;
      drawn.heads = drawn.kv_heads = 2;
      drawn.d_v = 72;
      expect_means(drawn, {100});
      drawn.kv_heads = 1;
      drawn.d_v = 43;
      drawn.v_layout = check::Layout::padded;
      expect_means(drawn, {100});
    }
  }
}

}  // namespace
}  // namespace dspattn
