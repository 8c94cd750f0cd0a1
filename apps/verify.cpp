#include "apps/verify.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <ostream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "apps/progress.h"

namespace dspattn::apps {
namespace {

constexpr std::int64_t kMostFailuresPrinted = 5;

void print_failure(const check::CaseReport& report, std::ostream& out) {
  out << "FAILED  " << report.command << "\n        " << report.description << "\n";
  for (const std::string& failure : report.failures) out << "        " << failure << "\n";
  out << std::flush;
}

// What has been found so far, shared by the workers.
struct Tally {
  std::mutex mutex;
  std::int64_t done = 0, passed = 0, failed = 0, not_served = 0, near_ties = 0;
  double worst = 0;
  std::map<std::string, std::int64_t> kernels;
  std::string one_refusal;

  void add(const check::CaseReport& report, Progress& progress, std::ostream& out) {
    const std::lock_guard lock(mutex);
    ++done;
    if (!report.served) {
      ++not_served;
      if (!report.reasons.empty()) one_refusal = report.reasons.front();
    } else if (report.passed()) {
      ++passed;
    } else if (++failed <= kMostFailuresPrinted) {
      progress.clear();
      print_failure(report, out);
    }
    if (report.served) ++kernels[report.kernel];
    near_ties += report.near_ties;
    worst = std::max(worst, report.worst);
    progress.show(done, std::to_string(failed) + " failed");
  }

  void print(std::ostream& out) const {
    for (const auto& [kernel, count] : kernels) out << "  " << kernel << ": " << count << " problems\n";
    if (failed > kMostFailuresPrinted) out << failed - kMostFailuresPrinted << " more failures are not shown\n";
    out << passed << " passed, " << failed << " failed";
    if (not_served > 0) out << ", " << not_served << " not served by the kernel";
    out << "; " << near_ties << " near-ties; largest error " << worst << " of what is allowed\n";
    if (passed + failed == 0) {
      out << "Nothing was checked" << (one_refusal.empty() ? "" : ", e.g.: " + one_refusal) << "\n";
    }
  }
};

void check_all(const VerifyPlan& plan, const CheckCase& check, Tally& tally, std::ostream& out) {
  Progress progress("verify", plan.count);
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;  // the first; guarded by the tally's mutex
  const auto work = [&] {
    try {
      for (std::int64_t index = next++; index < plan.count; index = next++) tally.add(check(index), progress, out);
    } catch (...) {
      next = plan.count;
      const std::lock_guard lock(tally.mutex);
      if (!error) error = std::current_exception();
    }
  };
  std::vector<std::jthread> workers;
  try {
    for (std::int64_t i = 1; i < std::min<std::int64_t>(plan.jobs, plan.count); ++i) workers.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads: those that there are do it
  }
  work();
  workers.clear();
  progress.clear();
  if (error) std::rethrow_exception(error);
}

void check_one(std::int64_t index, const CheckCase& check, Tally& tally, std::ostream& out) {
  Progress silent("verify", 0);
  const check::CaseReport report = check(index);
  out << report.description << "\n";
  tally.add(report, silent, out);
}

}  // namespace

Exit verify(const VerifyPlan& plan, const CheckCase& check, std::ostream& out) {
  out << "seed " << plan.seed << "\n" << std::flush;
  Tally tally;
  if (plan.only) {
    check_one(*plan.only, check, tally, out);
  } else {
    check_all(plan, check, tally, out);
  }
  tally.print(out);
  return tally.failed > 0 || tally.passed == 0 ? Exit::check_failed : Exit::ok;
}

}  // namespace dspattn::apps
