// What the tests of the checks share: problems that the oracle solves quickly, and a report as text.
#pragma once

#include <string>

#include "check/check.h"

namespace dspattn::check {

inline std::string text_of(const CaseReport& report) {
  std::string text = report.command + "\n" + report.description;
  for (const std::string& failure : report.failures) text.append("\n").append(failure);
  return text;
}

inline DrawLimits small_problems() {
  DrawLimits limits;
  limits.max_work = 150'000;
  return limits;
}

}  // namespace dspattn::check
