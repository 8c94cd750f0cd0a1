// Host side that the fused forward kernels share: which problems they serve, and parameters from problem and plan.
#pragma once

#include <string>

#include "core/kernel_row.h"
#include "cuda/device/facts.h"
#include "cuda/sm90/common/launch.h"
#include "cuda/sm90/common/params.h"
#include "cuda/sm90/common/plan.h"
#include "cuda/sm90/common/variant.h"

namespace dspattn::cuda::sm90 {

// One row of the kernel table.
struct FusedRow {
  DType type;
  Pattern pattern;
  int dim;        // largest head dim it takes
  int dim_above;  // and those above this
};

// sm90_fused_2_4_bf16_d64 (or what it begins with), and what the table asks a row by before it asks for reasons.
std::string row_name(const FusedRow& row, const std::string& begin = "sm90_fused_");
core::RowKey key_of(const FusedRow& row);

void fused_why_not(const FusedRow& row, const Problem& problem, core::Refusals& refusals);

using blocks::is_empty;

// All but the tensor maps of K and V and the order of keys, which are the kernels' own.
ForwardParams params_of(const ForwardArgs& args, const ForwardPlan& plan);

// A problem without work may still have rows of a packed output that no sequence has.
void clear_packed(const ForwardArgs& args);

// Writes what a kernel needs of packed batches and schedules before it runs.
// With rest = mean the means of V, too.
void prepare(const ForwardArgs& args, const ForwardPlan& plan, const ForwardParams& params, std::int64_t entries);

}  // namespace dspattn::cuda::sm90
