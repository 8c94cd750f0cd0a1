// The general kernel on a GPU: random problems of the whole contract per type and class of patterns against the oracle
// and beside the CPU kernel, reruns bit for bit, and a walk over the contract on which no problem is refused. Skipped
// without a GPU of compute capability 8.0 or later.
//   DSPATTN_FUSED_CASES   problems per class (default 40; 300 for the full check; below 20 only short ones)
//   DSPATTN_FUSED_SEED    what they are drawn from (default 7)
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check/case_data.h"
#include "check/check.h"
#include "core/device_memory.h"
#include "core/half.h"
#include "cuda/device/device.h"
#include "cuda/device/memory.h"
#include "cuda/general/rows.h"
#include "dspattn/attention.h"
#include "dspattn/kernels.h"
#include "dspattn/workspace.h"

namespace dspattn {
namespace {

std::int64_t from_environment(const char* name, std::int64_t otherwise) {
  const char* given = std::getenv(name);
  return given != nullptr ? std::max(1LL, std::atoll(given)) : otherwise;
}

// A type and the patterns of a class, drawn by turns.
struct Class {
  std::string name;
  DType dtype;
  std::vector<Pattern> patterns;

  std::string kernel() const { return "general_" + std::string(dspattn::name(dtype)); }
};

std::vector<Class> classes() {
  std::vector<Class> all;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    const std::string type(name(dtype));
    all.push_back({type + "_2_4", dtype, {{2, 4}}});
    all.push_back({type + "_1_2", dtype, {{1, 2}}});
    all.push_back({type + "_dense", dtype, {Pattern::dense(), {4, 4}}});
    all.push_back({type + "_other", dtype, {{1, 4}, {4, 8}, {3, 5}, {2, 16}, {7, 8}, {5, 32}, {2, 3}, {20, 31}}});
  }
  return all;
}

check::CheckOptions options_of(const Class& of, std::int64_t index, bool short_only) {
  check::CheckOptions options;
  options.device = {DeviceType::cuda, 0};
  options.beside_cpu = true;
  options.limits.pass = Pass::forward;
  options.limits.dtype = of.dtype;
  options.limits.pattern = of.patterns[static_cast<std::size_t>(index) % of.patterns.size()];
  const Pattern pattern = *options.limits.pattern;
  if (kInterleaveBlock % pattern.group != 0) options.limits.grouping = Grouping::consecutive;
  if (index % 4 == 0) options.limits.head_dim = index % 8 == 0 ? 128 : 64;
  if (index % 4 >= 2 && !short_only) {
    options.limits.max_n = 2049;
    options.limits.max_work = index % 16 == 2 ? 1'200'000'000 : 60'000'000;
  }
  return options;
}

class General : public ::testing::TestWithParam<Class> {
 protected:
  void SetUp() override {
    const cuda::DeviceFacts& device = cuda::device_facts(0);
    if (!device.present || device.major < 8) {
      GTEST_SKIP() << "needs a GPU of compute capability 8.0: " << (device.present ? "an older one" : device.absence);
    }
  }
};

// What the problems of a class showed, all together.
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

TEST_P(General, AgreesWithTheOracleAndTheCpuOnRandomProblems) {
  const Class& of = GetParam();
  const std::int64_t wanted = from_environment("DSPATTN_FUSED_CASES", 40);
  const auto seed = static_cast<std::uint64_t>(from_environment("DSPATTN_FUSED_SEED", 7));
  std::atomic<std::int64_t> next{0};
  Tally tally;
  const auto work = [&] {
    for (std::int64_t index = next++; index < wanted; index = next++) {
      const check::CheckOptions options = options_of(of, index, wanted < 20);
      const check::CaseReport report = check::check_case(seed, index, of.kernel(), options);
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
  std::cout << of.name << ": " << tally.served << " problems, " << tally.failed << " failed; " << tally.near_ties
            << " near-ties; " << tally.rows_beside_cpu << " rows beside the CPU's; largest error " << tally.worst
            << " of what is allowed\n";
  EXPECT_EQ(tally.served, wanted);
  EXPECT_EQ(tally.failed, 0);
}

TEST_P(General, GivesTheSameBitsOverReruns) {
  const Class& of = GetParam();
  int checked = 0;
  for (std::int64_t index = 0; checked < 2 && index < 1000; ++index) {
    check::CheckOptions options;
    options.device = {DeviceType::cuda, 0};
    options.limits.pass = Pass::forward;
    options.limits.dtype = of.dtype;
    options.limits.pattern = of.patterns.front();
    options.limits.max_n = 1025;
    options.limits.max_work = 300'000'000;
    options.reruns = 50;
    const check::Case drawn = check::draw_case(11, index, options.limits);
    if (drawn.batch * drawn.heads * drawn.n_q < 500 || drawn.n_k < 300) continue;
    const check::CaseReport report = check::check_case(11, index, of.kernel(), options);
    ASSERT_TRUE(report.served) << report.description;
    ++checked;
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << report.description << "\n" << failure << "\n" << report.command;
    }
  }
  EXPECT_EQ(checked, 2);
}

INSTANTIATE_TEST_SUITE_P(Classes, General, ::testing::ValuesIn(classes()),
                         [](const ::testing::TestParamInfo<Class>& of) { return of.param.name; });

// Pages in any order give the bits that one piece gives; keys in no page are hidden.
TEST_P(General, PagesInAnyOrder) {
  const Class& of = GetParam();
  constexpr std::int64_t kBatch = 2, kHeads = 4, kKeyHeads = 2, kQueries = 70, kPage = 48, kBlocks = 5, kPlaces = 11;
  constexpr std::int64_t kDim = 40, kKeys = kPage * kBlocks;
  const std::size_t element = size_bytes(of.dtype);
  core::DeviceMemory& memory = cuda::memory(0);
  // Small integers, which every type has.
  const auto random = [&](std::int64_t elements, int seed) {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(elements) * element);
    std::uint32_t state = static_cast<std::uint32_t>(seed);
    for (std::int64_t i = 0; i < elements; ++i) {
      state = state * 1664525u + 1013904223u;
      core::store_element(bytes.data(), of.dtype, i, static_cast<double>(state >> 28) - 7.5);
    }
    return bytes;
  };
  const auto upload = [&](const auto& values) {
    core::DeviceBuffer buffer(memory, values.size() * sizeof(values[0]));
    buffer.upload(values.data());
    return buffer;
  };
  const auto q = random(kBatch * kHeads * kQueries * kDim, 1);
  const auto k = random(kBatch * kKeyHeads * kKeys * kDim, 2), v = random(kBatch * kKeyHeads * kKeys * kDim, 3);
  std::vector<std::int32_t> table;
  for (std::int64_t i = 0; i < kBatch * kBlocks; ++i) table.push_back(static_cast<std::int32_t>(4 * i % kPlaces));
  const std::size_t page_bytes = kPage * kDim * element;
  const auto cut = [&](const std::vector<std::uint8_t>& whole) {  // places without a page hold NaN
    std::vector<std::uint8_t> pages(kPlaces * kKeyHeads * page_bytes, 0xFF);
    for (std::size_t b = 0; b < kBatch; ++b) {
      for (std::size_t head = 0; head < kKeyHeads; ++head) {
        for (std::size_t i = 0; i < kBlocks; ++i) {
          const auto place = static_cast<std::size_t>(table[b * kBlocks + i]);
          std::memcpy(pages.data() + (place * kKeyHeads + head) * page_bytes,
                      whole.data() + ((b * kKeyHeads + head) * kBlocks + i) * page_bytes, page_bytes);
        }
      }
    }
    return pages;
  };
  const core::DeviceBuffer gpu_q = upload(q), gpu_k = upload(k), gpu_v = upload(v);
  const core::DeviceBuffer k_pages = upload(cut(k)), v_pages = upload(cut(v));
  std::vector<std::uint8_t> allowed(kBatch * kKeys, 1);  // the second sequence lacks its third page
  std::fill_n(allowed.begin() + kKeys + 2 * kPage, kPage, 0);
  table[kBlocks + 2] = -1;
  const core::DeviceBuffer gpu_table = upload(table), gpu_allowed = upload(allowed);
  const auto run = [&](bool paged) {
    ForwardArgs args;
    args.problem.device = {DeviceType::cuda, 0};
    args.problem.q = {gpu_q.data(), of.dtype, {kBatch, kHeads, kQueries, kDim}};
    args.problem.pattern = of.patterns.front();
    args.problem.mask.causal = true;
    if (paged) {
      args.problem.k = {k_pages.data(), of.dtype, {kPlaces, kKeyHeads, kPage, kDim}};
      args.problem.v = {v_pages.data(), of.dtype, {kPlaces, kKeyHeads, kPage, kDim}};
      args.problem.block_table = {gpu_table.data(), DType::i32, {kBatch, kBlocks}};
    } else {
      args.problem.k = {gpu_k.data(), of.dtype, {kBatch, kKeyHeads, kKeys, kDim}};
      args.problem.v = {gpu_v.data(), of.dtype, {kBatch, kKeyHeads, kKeys, kDim}};
      args.problem.mask.allowed = {gpu_allowed.data(), DType::b8, {kBatch, 1, 1, kKeys}};
    }
    args.run.kernel = of.kernel();
    std::vector<std::uint8_t> out(q.size());
    core::DeviceBuffer gpu_out(memory, out.size());
    args.out = {gpu_out.data(), of.dtype, {kBatch, kHeads, kQueries, kDim}};
    Workspace workspace;
    workspace.attach(args);
    forward(args);
    gpu_out.download(out.data());
    return out;
  };
  EXPECT_EQ(run(true), run(false));
}

// Random problems of the whole contract as if on the GPU: a kernel is chosen by shapes, types and addresses alone.
TEST(GeneralTable, EveryValidForwardIsServed) {
  const cuda::DeviceFacts& device = cuda::device_facts(0);
  if (!device.present || device.major < 8) GTEST_SKIP() << "needs a GPU of compute capability 8.0";
  std::set<std::string> chosen;
  check::DrawLimits limits;
  limits.pass = Pass::forward;
  limits.max_work = 100'000;
  for (std::int64_t index = 0; index < 400; ++index) {
    const check::Case drawn = check::draw_case(9, index, limits);
    const check::CaseData data(drawn, {}, core::host_memory());
    Problem problem = data.host_problem();
    problem.device = {DeviceType::cuda, 0};
    try {
      chosen.insert(std::string(choose(problem, Pass::forward, {}, drawn.results()).name));
    } catch (const Error& error) {
      ADD_FAILURE() << check::describe(drawn) << "\n" << error.what();
    }
  }
  for (const core::KernelRow& row : cuda::general::general_rows()) {
    if (row.info.pass != Pass::forward) continue;
    EXPECT_TRUE(chosen.contains(std::string(row.info.name))) << row.info.name;
  }
  for (const std::string& name : chosen) EXPECT_EQ(name.find("pipeline"), std::string::npos) << name;
}

}  // namespace
}  // namespace dspattn
