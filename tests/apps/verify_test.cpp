// The loop of dspattn verify with checks that pass, fail or do not apply. That real faults of kernels are flagged is
// tested in tests/check; here, that a flagged one reaches the user and the exit code.
#include "apps/verify.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <new>
#include <set>
#include <sstream>
#include <string>
#include <thread>

namespace dspattn::apps {
namespace {

check::CaseReport passing(std::int64_t index) {
  check::CaseReport report;
  report.description = "problem " + std::to_string(index);
  report.command = "dspattn verify --seed 5 --case " + std::to_string(index);
  report.kernel = "k";
  return report;
}

std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Verify, AllPassing) {
  std::ostringstream out;
  EXPECT_EQ(verify({5, 20, std::nullopt, 3}, passing, out), Exit::ok);
  EXPECT_NE(out.str().find("seed 5\n"), std::string::npos);
  EXPECT_NE(out.str().find("k: 20 problems"), std::string::npos);
  EXPECT_NE(out.str().find("20 passed, 0 failed"), std::string::npos);
}

TEST(Verify, EveryCaseIsCheckedOnce) {
  std::mutex mutex;
  std::multiset<std::int64_t> seen;
  std::ostringstream out;
  verify(
      {5, 100, std::nullopt, 4},
      [&](std::int64_t index) {
        const std::lock_guard lock(mutex);
        seen.insert(index);
        return passing(index);
      },
      out);
  EXPECT_EQ(seen.size(), 100u);
  for (std::int64_t i = 0; i < 100; ++i) EXPECT_EQ(seen.count(i), 1u) << i;
}

TEST(Verify, AFailureIsPrintedAsTheCommandThatRepeatsIt) {
  std::ostringstream out;
  const CheckCase check = [](std::int64_t index) {
    check::CaseReport report = passing(index);
    if (index == 3) report.failures = {"out: expected 1, got 2"};
    return report;
  };
  EXPECT_EQ(verify({5, 10, std::nullopt, 2}, check, out), Exit::check_failed);
  EXPECT_NE(
      out.str().find("FAILED  dspattn verify --seed 5 --case 3\n        problem 3\n        out: expected 1, got 2\n"),
      std::string::npos);
  EXPECT_NE(out.str().find("9 passed, 1 failed"), std::string::npos);
}

TEST(Verify, ManyFailuresAreCounted) {
  std::ostringstream out;
  const CheckCase check = [](std::int64_t index) {
    check::CaseReport report = passing(index);
    report.failures = {"wrong"};
    return report;
  };
  EXPECT_EQ(verify({5, 30, std::nullopt, 1}, check, out), Exit::check_failed);
  EXPECT_EQ(occurrences(out.str(), "FAILED"), 5u);
  EXPECT_NE(out.str().find("25 more failures are not shown"), std::string::npos);
}

TEST(Verify, NothingCheckedIsNoSuccess) {
  std::ostringstream out;
  const CheckCase check = [](std::int64_t index) {
    check::CaseReport report = passing(index);
    report.served = false;
    report.reasons = {"device: no GPU"};
    return report;
  };
  EXPECT_EQ(verify({5, 4, std::nullopt, 1}, check, out), Exit::check_failed);
  EXPECT_NE(out.str().find("Nothing was checked, e.g.: device: no GPU"), std::string::npos);
}

// On whichever thread it happens: out of memory, say.
TEST(Verify, WhatACheckThrowsEndsIt) {
  std::ostringstream out;
  std::atomic<int> checked{0};
  const CheckCase check = [&](std::int64_t index) {
    if (++checked == 20) throw std::bad_alloc();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // so that every thread comes to check some
    return passing(index);
  };
  EXPECT_THROW(verify({5, 100000, std::nullopt, 4}, check, out), std::bad_alloc);
  EXPECT_LT(checked, 1000);
}

TEST(Verify, OneCaseAlone) {
  std::ostringstream out;
  EXPECT_EQ(verify({5, 1000, 7, 2}, passing, out), Exit::ok);
  EXPECT_NE(out.str().find("problem 7\n"), std::string::npos);
  EXPECT_NE(out.str().find("1 passed, 0 failed"), std::string::npos);
}

}  // namespace
}  // namespace dspattn::apps
