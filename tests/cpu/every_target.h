// What the tests of the fast CPU rows share: every instruction set, and comparison with the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/simd.h"
#include "hwy/targets.h"

namespace dspattn::cpu {

// Sanitizers hold memory of their own and slow the oracle down.
#ifdef DSPATTN_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// A result may differ from the oracle's by rounding: of fp32 sums, and of the type it is stored in.
inline void expect_close(const std::vector<double>& ours, const std::vector<double>& oracle, double absolute,
                         double relative, const char* what) {
  ASSERT_EQ(ours.size(), oracle.size()) << what;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (std::isnan(oracle[i])) {
      ASSERT_TRUE(std::isnan(ours[i])) << what << " at " << i;
    } else if (std::isinf(oracle[i])) {
      ASSERT_EQ(ours[i], oracle[i]) << what << " at " << i;
    } else {
      ASSERT_NEAR(ours[i], oracle[i], absolute + relative * std::fabs(oracle[i])) << what << " at " << i;
    }
  }
}

// Each instruction set the library is compiled for and this machine has.
class EveryTarget : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

inline std::vector<std::int64_t> targets() {
  std::vector<std::int64_t> list;
  const std::int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  for (int bit = 0; bit < 63; ++bit) {
    if (usable & (std::int64_t{1} << bit)) list.push_back(std::int64_t{1} << bit);
  }
  return list;
}

inline std::string target_name(const testing::TestParamInfo<std::int64_t>& target) {
  return hwy::TargetName(target.param);
}

}  // namespace dspattn::cpu
