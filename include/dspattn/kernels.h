// The table of compiled kernels, and which of them would serve a problem.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dspattn/attention.h"

namespace dspattn {

enum class Pass : std::uint8_t { forward, backward };

struct KernelInfo {
  std::string_view name;  // unique within a pass, e.g. "cpu_2_4", "cpu_reference", "sm90_fused_2_4_bf16_d64"
  Pass pass = Pass::forward;
  DeviceType device = DeviceType::cpu;
  std::string_view summary;  // one line: instruction set, types, head dims, patterns
};

// In order of preference: the first that fits, and does not yield, is chosen.
std::vector<KernelInfo> kernels(Pass pass);

struct Verdict {
  KernelInfo kernel;
  std::vector<std::string> reasons;  // why the kernel cannot serve; empty: it can
  bool yields = false;               // it can, but is taken only where no other kernel can: one further down is faster
};

// The type of the outputs (of a backward pass, of anything among out, d_out, d_q, d_k, d_v).
enum class Results : std::uint8_t { as_inputs, fp32 };

// Every kernel of the pass with every reason it cannot serve the problem.
std::vector<Verdict> consider(const Problem& problem, Pass pass, Results results = Results::as_inputs);

// The kernel that forward/backward would run. Throws Error with all verdicts when there is none, or when `forced` names
// no kernel or one that cannot serve.
KernelInfo choose(const Problem& problem, Pass pass, std::string_view forced = {},
                  Results results = Results::as_inputs);

// How that kernel would go about it, in lines of text: variant, tiles, order of the work, launch. Empty where a kernel
// has nothing to decide. Outputs are taken to be contiguous.
std::string plan(const Problem& problem, Pass pass, std::string_view forced = {}, Results results = Results::as_inputs);

}  // namespace dspattn
