// Host side of the split-key kernels: which problems they serve, and launches.
#pragma once

#include <cstddef>
#include <string>

#include "core/kernel_row.h"

namespace dspattn::cuda::decode {

struct Plan;

// One row of the kernel table.
struct DecodeRow {
  DType type;
  int dim;        // largest head dim it takes
  int dim_above;  // and those above this
};

std::string row_name(const DecodeRow& row);
void why_not(const DecodeRow& row, const Problem& problem, core::Refusals& refusals);
std::string describe_plan(const DecodeRow& row, const Problem& problem);
std::size_t workspace(const DecodeRow& row, const ForwardArgs& args);
void forward_launch(const DecodeRow& row, const ForwardArgs& args);
// By another plan than the one that would be chosen, of plan_of(): the workspace is what that one wants.
void forward_launch(const DecodeRow& row, const ForwardArgs& args, const Plan& plan);

}  // namespace dspattn::cuda::decode
