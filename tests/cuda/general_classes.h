// The problems that the general kernels' tests draw: a type, and the patterns of a class.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "check/case_data.h"
#include "check/check.h"
#include "core/device_memory.h"
#include "cuda/general/rows.h"
#include "cuda/random_problems.h"
#include "dspattn/kernels.h"

namespace dspattn {

struct GeneralClass {
  std::string name;
  DType dtype;
  std::vector<Pattern> patterns;  // drawn by turns

  std::string kernel() const { return "general_" + std::string(dspattn::name(dtype)); }

  check::CheckOptions options(Pass pass, std::int64_t index) const {
    check::CheckOptions options;
    options.device = {DeviceType::cuda, 0};
    options.limits.pass = pass;
    options.limits.dtype = dtype;
    options.limits.pattern = patterns[static_cast<std::size_t>(index) % patterns.size()];
    if (kInterleaveBlock % options.limits.pattern->group != 0) options.limits.grouping = Grouping::consecutive;
    return options;
  }
};

inline std::vector<GeneralClass> general_classes() {
  std::vector<GeneralClass> all;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    const std::string type(name(dtype));
    all.push_back({type + "_2_4", dtype, {{2, 4}}});
    all.push_back({type + "_1_2", dtype, {{1, 2}}});
    all.push_back({type + "_dense", dtype, {Pattern::dense(), {4, 4}}});
    all.push_back({type + "_other", dtype, {{1, 4}, {4, 8}, {3, 5}, {2, 16}, {7, 8}, {5, 32}, {2, 3}, {20, 31}}});
  }
  return all;
}

// Random problems of the whole contract as if on the GPU, where a kernel is chosen by shapes, types and addresses
// alone: none is refused, and every general row of the pass is chosen for some. Returns the names of those that were.
inline std::set<std::string> expect_all_served(Pass pass) {
  std::set<std::string> chosen;
  check::DrawLimits limits;
  limits.pass = pass;
  limits.max_work = 100'000;
  for (std::int64_t index = 0; index < 400; ++index) {
    const check::Case drawn = check::draw_case(9, index, limits);
    const check::CaseData data(drawn, {}, core::host_memory());
    Problem problem = data.host_problem();
    problem.device = {DeviceType::cuda, 0};
    try {
      chosen.insert(std::string(choose(problem, pass, {}, drawn.results()).name));
    } catch (const Error& error) {
      ADD_FAILURE() << check::describe(drawn) << "\n" << error.what();
    }
  }
  for (const core::KernelRow& row : cuda::general::general_rows()) {
    if (row.info.pass != pass) continue;
    EXPECT_TRUE(chosen.contains(std::string(row.info.name))) << row.info.name;
  }
  return chosen;
}

}  // namespace dspattn
