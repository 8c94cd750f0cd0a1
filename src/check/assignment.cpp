#include "check/assignment.h"

#include <algorithm>

#include "api/device_memory.h"
#include "api/kernel_table.h"
#include "check/case_data.h"
#include "dspattn/error.h"

namespace dspattn::check {
namespace {

// What some kernel of the device and the pass serves beyond the plain contract, or the one of that name.
core::Features served_features(Pass pass, const std::string& kernel, DeviceType device) {
  core::Features served;
  for (const core::KernelRow* row : api::table(pass)) {
    if (row->info.device != device || (!kernel.empty() && row->info.name != kernel)) continue;
    for (const core::Feature feature : core::kAllFeatures) {
      if (row->features.has(feature)) served.add(feature);
    }
  }
  return served;
}

// All reasons a kernel cannot serve; empty when it can. Without a name: when any kernel can.
std::vector<std::string> refusals(const Problem& problem, Pass pass, const std::string& kernel, Results results) {
  std::vector<std::string> all;
  for (const Verdict& verdict : consider(problem, pass, results)) {
    if (!kernel.empty() && verdict.kernel.name != kernel) continue;
    if (verdict.reasons.empty()) return {};
    all.insert(all.end(), verdict.reasons.begin(), verdict.reasons.end());
  }
  return all.empty() ? std::vector<std::string>{"no kernel for this device"} : all;
}

}  // namespace

bool has_kernel(Pass pass, const std::string& name) {
  const std::vector<KernelInfo> all = kernels(pass);
  return std::any_of(all.begin(), all.end(), [&](const KernelInfo& info) { return info.name == name; });
}

Case restricted(Case drawn, const std::string& kernel, DeviceType device) {
  drawn = drawn.restricted_to(served_features(drawn.pass, kernel, device));
  if (drawn.pass == Pass::backward && (kernel.empty() || has_kernel(Pass::forward, kernel))) {
    core::Features forward = served_features(Pass::forward, kernel, device);
    for (const core::Feature gradient : {core::Feature::d_lse, core::Feature::d_bias, core::Feature::d_sinks}) {
      forward.add(gradient);
    }
    drawn = drawn.restricted_to(forward);
  }
  return drawn;
}

Assignment assign(const Case& drawn, const std::string& kernel, Device device) {
  const CaseData data(drawn, device, api::memory_of(device));
  const Problem& problem = data.device_problem();
  Assignment assigned{refusals(problem, drawn.pass, kernel, drawn.results()), {}, kernel};
  if (assigned.reasons.empty() && drawn.pass == Pass::backward) {
    // The forward of the same name made the selection that this backward repeats; without one, the library's choice.
    if (!has_kernel(Pass::forward, kernel) || !refusals(problem, Pass::forward, kernel, drawn.results()).empty())
      assigned.forward_kernel.clear();
    assigned.reasons = refusals(problem, Pass::forward, assigned.forward_kernel, drawn.results());
  }
  if (!assigned.reasons.empty()) return assigned;
  core::Features needed = api::needed_by(problem, drawn.results());
  if (drawn.d_lse) needed.add(core::Feature::d_lse);
  if (drawn.d_bias) needed.add(core::Feature::d_bias);
  if (drawn.d_sinks) needed.add(core::Feature::d_sinks);
  try {
    assigned.kernel = api::choose_row(problem, drawn.pass, kernel, needed).info.name;
  } catch (const Error& error) {
    assigned.reasons = error.reasons();
  }
  return assigned;
}

}  // namespace dspattn::check
