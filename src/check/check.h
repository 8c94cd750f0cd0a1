// Checks a kernel of the table on random problems of the whole contract against the fp64 oracle.
//
//   CaseReport report = check_case(seed, index, "cpu_2_4");
//
// Selection is discontinuous, so a result is compared in three parts: the selection must be the oracle's, exactly on
// small-integer inputs and up to near-ties otherwise; output, LSE and gradients must lie within check/tolerance.h of
// the oracle given the kernel's own selection; and nothing but the outputs' elements may be written. Reruns, and on the
// CPU 1, 2 and 5 threads, must give identical bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/case.h"
#include "check/runner.h"

namespace dspattn::check {

struct CheckOptions {
  Device device;
  DrawLimits limits;
  int reruns = 1;           // runs that must give the same bits again, on the CPU with 1, 2 and 5 threads; 0: none
  bool beside_cpu = false;  // also compare with the library's CPU kernel, where both select alike (forward)
};

struct CaseReport {
  std::string description;            // the problem in one line
  std::string command;                // runs this case alone
  std::string kernel;                 // what ran
  bool served = true;                 // false: the kernel does not take such a problem
  std::vector<std::string> reasons;   // why not, when not served
  std::vector<std::string> failures;  // empty: passed
  std::int64_t near_ties = 0;         // groups decided otherwise than by the oracle, within rounding
  std::int64_t rows_beside_cpu = 0;   // rows compared with the CPU kernel's
  double worst = 0;                   // largest error as a fraction of what is allowed

  bool passed() const { return failures.empty(); }
};

// Draws case `index` of `seed` and checks the kernel (empty: the one the library chooses). A kernel that exists in one
// pass only is checked in that pass. Never throws for what a kernel does; throws Error for a name that is no kernel.
CaseReport check_case(std::uint64_t seed, std::int64_t index, const std::string& kernel = {},
                      const CheckOptions& options = {});

// The same on a given case with a given way to run it.
CaseReport check_drawn(const Case& drawn, const Runner& runner, const CheckOptions& options = {});

// dspattn verify --seed S --case I [--kernel K] [...]: the command that repeats a case.
std::string command_line(std::uint64_t seed, std::int64_t index, const std::string& kernel,
                         const CheckOptions& options);

}  // namespace dspattn::check
