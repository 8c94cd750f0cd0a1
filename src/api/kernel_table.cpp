#include "api/kernel_table.h"

#include <span>

#include "core/validate.h"
#include "cpu/rows.h"
#include "cuda/rows.h"
#include "dspattn/kernels.h"

namespace dspattn {
namespace api {
namespace {

std::string_view name(DeviceType type) { return type == DeviceType::cpu ? "cpu" : "cuda"; }

// fp32 inputs have fp32 results anyway.
bool takes_results(const core::KernelRow& row, const Problem& problem, Results results) {
  return row.fp32_results || results == Results::as_inputs || problem.q.dtype == DType::f32;
}

core::Reasons why_not(const core::KernelRow& row, const Problem& problem, Results results) {
  if (row.info.device != problem.device.type) {
    return {"device: runs on " + std::string(name(row.info.device)) + ", the tensors are on " +
            std::string(name(problem.device.type))};
  }
  core::Refusals refusals(core::Refusals::Text::wanted);
  row.why_not(problem, refusals);
  if (!takes_results(row, problem, results)) {
    refusals.add([&] {
      return "out.dtype: takes results in q's type " + std::string(dspattn::name(problem.q.dtype)) + ", got fp32";
    });
  }
  return refusals.reasons();
}

bool serves(const core::KernelRow& row, const Problem& problem, Results results) {
  if (row.info.device != problem.device.type || !row.takes.matches(problem) || !takes_results(row, problem, results)) {
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

std::vector<const core::KernelRow*> table(Pass pass) {
  std::vector<const core::KernelRow*> selected;
  for (const std::span<const core::KernelRow> backend : {cuda::rows(), cpu::rows()}) {
    for (const core::KernelRow& row : backend) {
      if (row.info.pass == pass) selected.push_back(&row);
    }
  }
  return selected;
}

const core::KernelRow& choose_row(const Problem& problem, Pass pass, std::string_view forced, Results results) {
  const auto asked = [&](const core::KernelRow& row) {
    return row.info.pass == pass && (forced.empty() || row.info.name == forced);
  };
  // Every call comes by here: what the refusals say is put together only when all refuse.
  for (const std::span<const core::KernelRow> backend : {cuda::rows(), cpu::rows()}) {
    for (const core::KernelRow& row : backend) {
      if (asked(row) && serves(row, problem, results)) return row;
    }
  }
  core::Reasons refusals;
  const std::vector<const core::KernelRow*> rows = table(pass);
  for (const core::KernelRow* row : rows) {
    if (asked(*row)) refusals.push_back(describe(*row, why_not(*row, problem, results)));
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
  std::vector<Verdict> verdicts;
  for (const core::KernelRow* row : api::table(pass)) {
    verdicts.push_back({row->info, api::why_not(*row, problem, results)});
  }
  return verdicts;
}

std::string plan(const Problem& problem, Pass pass, std::string_view forced, Results results) {
  if (auto reasons = core::problem_reasons(problem); !reasons.empty()) throw Error(std::move(reasons));
  const core::KernelRow& row = api::choose_row(problem, pass, forced, results);
  return row.plan != nullptr ? row.plan(problem) : std::string();
}

KernelInfo choose(const Problem& problem, Pass pass, std::string_view forced, Results results) {
  if (auto reasons = core::problem_reasons(problem); !reasons.empty()) throw Error(std::move(reasons));
  return api::choose_row(problem, pass, forced, results).info;
}

}  // namespace dspattn
