// One cell of a benchmark: a problem with random data on a device, and the time of a call, alternating with the same
// problem computed densely where the device has a kernel for that.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "dspattn/attention.h"
#include "dspattn/kernels.h"

namespace dspattn::apps {

struct CellShape {
  Device device;
  DType dtype = DType::f32;
  Pattern pattern;
  Grouping grouping = Grouping::interleaved;
  Rest rest = Rest::drop;
  Pass pass = Pass::forward;
  bool causal = false;
  std::int64_t batch = 1, heads = 1, kv_heads = 1, n_q = 1, n_k = 1, d = 1;
};

struct Timing {
  std::string kernel;
  double median_us = 0;
  double spread_us = 0;  // 90th less 10th percentile
  double tflops = 0;     // dense-equivalent: 4 batch heads n_q n_k d, halved when causal, times 2.5 for backward
};

struct CellResult {
  Timing ours;
  std::optional<Timing> dense;  // the same problem with pattern dense, where the pattern is another and a kernel serves
};

struct CellOptions {
  std::string kernel;  // empty: the library's choice
  int threads = 0;
  double seconds = 0.5;  // time spent on each of the two
};

CellResult time_cell(const CellShape& shape, const CellOptions& options);

}  // namespace dspattn::apps
