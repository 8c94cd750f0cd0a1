// What the tests on a GPU do with random problems of the contract: check them against the oracle and beside the CPU
// kernel, and run them again and again.
//
// The oracle, in fp64 on the CPU, takes nearly all of the time, so problems are checked by as many threads as there are
// cores; they share the GPU's default stream.
//   DSPATTN_FUSED_CASES   problems per row or class (default 40; 300 for the full check; below 20, as under
//                         compute-sanitizer, only short ones)
//   DSPATTN_FUSED_SEED    what they are drawn from (default 7)
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "check/check.h"
#include "core/kernel_row.h"
#include "cuda/device/facts.h"

namespace dspattn {

inline std::int64_t from_environment(const char* name, std::int64_t otherwise) {
  const char* given = std::getenv(name);
  return given != nullptr ? std::max(1LL, std::atoll(given)) : otherwise;
}

inline std::int64_t problems_wanted() { return from_environment("DSPATTN_FUSED_CASES", 40); }
inline std::uint64_t problems_seed() { return static_cast<std::uint64_t>(from_environment("DSPATTN_FUSED_SEED", 7)); }

// Why tests cannot run here; empty when they can.
inline std::string no_hopper() {
  const cuda::DeviceFacts& device = cuda::device_facts(0);
  if (device.present && device.major == 9) return {};
  return "needs a Hopper GPU: " + (device.present ? "another architecture" : device.absence);
}
inline std::string no_ampere() {
  const cuda::DeviceFacts& device = cuda::device_facts(0);
  if (device.present && device.major >= 8) return {};
  return "needs a GPU of compute capability 8.0 or later: " + (device.present ? "an older one" : device.absence);
}

inline std::vector<std::string> names_of(std::span<const core::KernelRow> rows) {
  std::vector<std::string> names;
  for (const core::KernelRow& row : rows) names.emplace_back(row.info.name);
  return names;
}

// The name of a test of a row, or of a class of problems that has one.
template <typename Param>
std::string name_of(const ::testing::TestParamInfo<Param>& info) {
  if constexpr (requires { info.param.name; }) {
    return info.param.name;
  } else {
    return info.param;
  }
}

inline void expect_passed(const check::CaseReport& report) {
  ASSERT_TRUE(report.served) << report.description << "\nnot served: " << report.reasons.front() << "\n"
                             << report.command;
  for (const std::string& failure : report.failures) {
    ADD_FAILURE() << report.description << "\n" << failure << "\n" << report.command;
  }
}

// What the problems of a row or class showed, all together.
struct Tally {
  std::mutex mutex;
  std::int64_t served = 0, failed = 0, near_ties = 0, rows_beside_cpu = 0;
  double worst = 0;

  void add(const check::CaseReport& report) {
    constexpr std::int64_t kFailuresPrinted = 5;
    const std::lock_guard lock(mutex);
    if (report.served) ++served;
    near_ties += report.near_ties;
    rows_beside_cpu += report.rows_beside_cpu;
    worst = std::max(worst, report.worst);
    if ((report.served && report.passed()) || ++failed > kFailuresPrinted) return;
    expect_passed(report);
  }
};

// As many problems as are wanted, of those that the kernel takes: options_of(index, short ones only) says what is
// drawn, takes(case) whether that is one. Returns how many rows were compared with the CPU kernel's.
template <typename OptionsOf, typename Takes>
std::int64_t expect_agreement(const std::string& title, const std::string& kernel, OptionsOf options_of, Takes takes) {
  const std::int64_t wanted = problems_wanted();
  const std::uint64_t seed = problems_seed();
  std::atomic<std::int64_t> next{0}, taken{0};
  Tally tally;
  const auto work = [&] {
    for (std::int64_t index = next++; taken < wanted && index < 100 * wanted; index = next++) {
      const check::CheckOptions options = options_of(index, wanted < 20);
      if (!takes(check::draw_case(seed, index, options.limits))) continue;
      if (taken++ >= wanted) break;
      tally.add(check::check_case(seed, index, kernel, options));
    }
  };
  {
    std::vector<std::jthread> workers;
    for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) workers.emplace_back(work);
  }
  std::cout << title << ": " << tally.served << " problems, " << tally.failed << " failed; " << tally.near_ties
            << " near-ties; " << tally.rows_beside_cpu << " rows beside the CPU's; largest error " << tally.worst
            << " of what is allowed\n";
  EXPECT_EQ(tally.served, wanted);
  EXPECT_EQ(tally.failed, 0);
  return tally.rows_beside_cpu;
}

// `wanted` problems that are long enough for many tiles and items on every multiprocessor, run as often more as
// options.reruns says.
template <typename Takes>
void expect_same_bits(const std::string& kernel, const check::CheckOptions& options, int wanted, Takes takes) {
  int checked = 0;
  for (std::int64_t index = 0; checked < wanted && index < 1000; ++index) {
    const check::Case drawn = check::draw_case(11, index, options.limits);
    if (drawn.batch * drawn.heads * drawn.n_q < 500 || drawn.n_k < 300 || !takes(drawn)) continue;
    expect_passed(check::check_case(11, index, kernel, options));
    ++checked;
  }
  EXPECT_EQ(checked, wanted);
}

}  // namespace dspattn
