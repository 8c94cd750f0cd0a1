// Problems of few queries on a GPU, as the tests of the split-key rows give them, and the check of one.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "api/device_memory.h"
#include "check/check.h"

namespace dspattn {

inline constexpr Device kGpu{DeviceType::cuda, 0};

inline core::DeviceMemory& gpu_memory() { return api::memory_of(kGpu); }

inline check::Case few_queries(DType dtype, std::int64_t dim, std::int64_t heads, std::int64_t kv_heads,
                               std::int64_t n_q, std::int64_t n_k) {
  check::Case drawn;
  drawn.seed = 5;
  drawn.dtype = dtype;
  drawn.pattern = {2, 4};
  drawn.grouping = Grouping::interleaved;
  drawn.heads = heads;
  drawn.kv_heads = kv_heads;
  drawn.n_q = n_q;
  drawn.n_k = n_k;
  drawn.d = drawn.d_v = dim;
  return drawn;
}

inline void expect_right(const check::Case& drawn, const std::string& kernel) {
  check::CheckOptions options;
  options.device = kGpu;
  const check::CaseReport report = check::check_drawn(drawn, check::library_runner(gpu_memory(), kernel, {}), options);
  for (const std::string& failure : report.failures) ADD_FAILURE() << report.description << "\n" << failure;
}

}  // namespace dspattn
