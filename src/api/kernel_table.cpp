#include "api/kernel_table.h"

#include <span>
#include <utility>

#include "core/validate.h"
#include "cpu/rows.h"
#include "cuda/rows.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace api {
namespace {

std::string_view name(DeviceType type) { return type == DeviceType::cpu ? "cpu" : "cuda"; }

// Kernels of the same pass and device that have what this one lacks and take the problem's type and head dims.
std::string served_by(core::Feature feature, const core::KernelRow& row, const Problem& problem) {
  std::string names;
  for (const core::KernelRow* other : table(row.info.pass)) {
    if (other->info.device != row.info.device || !other->features.has(feature) || !other->takes.matches(problem)) {
      continue;
    }
    names += (names.empty() ? "; served by " : ", ") + std::string(other->info.name);
  }
  return names;
}

// Why a kernel without the feature cannot serve.
std::string refusal(core::Feature feature, const core::KernelRow& row, const Problem& problem) {
  switch (feature) {
    case core::Feature::fp32_results:
      return "out.dtype: takes results in q's type " + std::string(dspattn::name(problem.q.dtype)) + ", got fp32" +
             served_by(feature, row, problem);
    case core::Feature::rest_mean:
      return "rest: takes drop, got mean";
    case core::Feature::shared_choice:
      return "choice: takes each head's own, got shared";
    case core::Feature::dropout:
      return "dropout: takes probability 0, got " + std::to_string(problem.dropout.probability);
    case core::Feature::soft_cap:
      return "soft_cap: takes none, got " + std::to_string(problem.soft_cap.value_or(0));
    case core::Feature::sinks:
      return "sinks: takes none, got some";
    case core::Feature::paged:
      return "block_table: takes none (k and v in one piece), got one";
    case core::Feature::d_lse:
      return "d_lse: takes none, got one";
    case core::Feature::d_bias:
      return "d_bias: takes none (it does not compute the gradient of a bias), got one";
    case core::Feature::d_sinks:
      return "d_sinks: takes none, got one";
  }
  return "";
}

core::Reasons why_not(const core::KernelRow& row, const Problem& problem, core::Features needed) {
  if (row.info.device != problem.device.type) {
    return {"device: runs on " + std::string(name(row.info.device)) + ", the tensors are on " +
            std::string(name(problem.device.type))};
  }
  core::Refusals refusals(core::Refusals::Text::wanted);
  row.why_not(problem, refusals);
  for (const core::Feature feature : core::kAllFeatures) {
    if (needed.has(feature) && !row.features.has(feature)) refusals.add([&] { return refusal(feature, row, problem); });
  }
  return refusals.reasons();
}

bool serves(const core::KernelRow& row, const Problem& problem, core::Features needed) {
  if (row.info.device != problem.device.type || !row.takes.matches(problem) || !row.features.has_all(needed)) {
    return false;
  }
  core::Refusals refusals(core::Refusals::Text::not_wanted);
  row.why_not(problem, refusals);
  return !refusals.any();
}

std::string describe(const core::KernelRow& row, const core::Reasons& reasons) {
  std::string text = "kernel " + std::string(row.info.name) + " cannot serve: ";
  for (std::size_t i = 0; i < reasons.size(); ++i) text += (i > 0 ? "; " : "") + reasons[i];
  return text;
}

std::string names_of(const std::vector<const core::KernelRow*>& rows) {
  std::string text;
  for (const core::KernelRow* row : rows) text += (text.empty() ? "" : ", ") + std::string(row->info.name);
  return text;
}

}  // namespace

core::Features needed_by(const Problem& problem, Results results) {
  core::Features needed;
  const auto need = [&](core::Feature feature, bool condition) {
    if (condition) needed.add(feature);
  };
  // fp32 inputs have fp32 results anyway.
  need(core::Feature::fp32_results, results == Results::fp32 && problem.q.dtype != DType::f32);
  need(core::Feature::rest_mean, problem.rest == Rest::mean);
  need(core::Feature::shared_choice, problem.choice == Choice::shared);
  need(core::Feature::dropout, problem.dropout.probability > 0);
  need(core::Feature::soft_cap, problem.soft_cap.has_value());
  need(core::Feature::sinks, problem.sinks.present());
  need(core::Feature::paged, problem.block_table.present());
  return needed;
}

std::vector<const core::KernelRow*> table(Pass pass) {
  std::vector<const core::KernelRow*> selected;
  for (const std::span<const core::KernelRow> backend : {cuda::rows(), cpu::rows()}) {
    for (const core::KernelRow& row : backend) {
      if (row.info.pass == pass) selected.push_back(&row);
    }
  }
  return selected;
}

const core::KernelRow& choose_row(const Problem& problem, Pass pass, std::string_view forced, core::Features needed) {
  const auto asked = [&](const core::KernelRow& row) {
    return row.info.pass == pass && (forced.empty() || row.info.name == forced);
  };
  // Every call comes by here: what the refusals say is put together only when all refuse.
  const core::KernelRow* yielding = nullptr;  // the first that serves, but not as fast as another might
  for (const std::span<const core::KernelRow> backend : {cuda::rows(), cpu::rows()}) {
    for (const core::KernelRow& row : backend) {
      if (!asked(row) || !serves(row, problem, needed)) continue;
      if (!forced.empty() || row.yields == nullptr || !row.yields(problem)) return row;
      if (yielding == nullptr) yielding = &row;
    }
  }
  if (yielding != nullptr) return *yielding;
  core::Reasons refusals;
  const std::vector<const core::KernelRow*> rows = table(pass);
  for (const core::KernelRow* row : rows) {
    if (asked(*row)) refusals.push_back(describe(*row, why_not(*row, problem, needed)));
  }
  if (refusals.empty()) {
    throw Error("kernel: expected one of " + names_of(rows) + ", got \"" + std::string(forced) + "\"");
  }
  throw Error(std::move(refusals));
}

}  // namespace api

std::vector<KernelInfo> kernels(Pass pass) {
  std::vector<KernelInfo> infos;
  for (const core::KernelRow* row : api::table(pass)) infos.push_back(row->info);
  return infos;
}

std::vector<Verdict> consider(const Problem& problem, Pass pass, Results results) {
  if (auto reasons = core::problem_reasons(problem); !reasons.empty()) throw Error(std::move(reasons));
  const core::Features needed = api::needed_by(problem, results);
  std::vector<Verdict> verdicts;
  for (const core::KernelRow* row : api::table(pass)) {
    core::Reasons reasons = api::why_not(*row, problem, needed);
    const bool yields = reasons.empty() && row->yields != nullptr && row->yields(problem);
    verdicts.push_back({row->info, std::move(reasons), yields});
  }
  return verdicts;
}

std::string plan(const Problem& problem, Pass pass, std::string_view forced, Results results) {
  if (auto reasons = core::problem_reasons(problem); !reasons.empty()) throw Error(std::move(reasons));
  const core::KernelRow& row = api::choose_row(problem, pass, forced, api::needed_by(problem, results));
  return row.plan != nullptr ? row.plan(problem) : std::string();
}

KernelInfo choose(const Problem& problem, Pass pass, std::string_view forced, Results results) {
  if (auto reasons = core::problem_reasons(problem); !reasons.empty()) throw Error(std::move(reasons));
  return api::choose_row(problem, pass, forced, api::needed_by(problem, results)).info;
}

}  // namespace dspattn
