// The loop behind dspattn verify, apart from its command line: so that it can be run with a check that fails.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>

#include "apps/commands.h"
#include "check/check.h"

namespace dspattn::apps {

struct VerifyPlan {
  std::uint64_t seed = 0;
  std::int64_t count = 1000;
  std::optional<std::int64_t> only;  // this case alone
  int jobs = 1;                      // cases checked side by side
};

// Checks one case of the seed.
using CheckCase = std::function<check::CaseReport(std::int64_t index)>;

// Runs the cases, prints failures as they come and a summary, and returns check_failed when one failed or none could be
// checked.
Exit verify(const VerifyPlan& plan, const CheckCase& check, std::ostream& out);

}  // namespace dspattn::apps
