// How the general forward kernel will serve a problem: every decision of the host, a pure function of problem and
// device, printed by `dspattn kernels`. Launching only fills parameters from a plan.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/device/facts.h"
#include "cuda/general/config.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::general {

// What an instance was compiled with.
struct Shape {
  int dim = 0;  // head dim
  int tile_q = 0, tile_k = 0;
  int threads = 0;
  int shared_bytes[2] = {};  // dynamic, with one stage of K and V, and with two
};

Shape shape_of(DType type, Kind kind, int dim);

struct ForwardPlan {
  Kind kind = Kind::any;
  Shape shape;
  int stages = 1;     // of K and V
  int resident = 1;   // CTAs of a multiprocessor, as far as shared memory goes, at most 2
  int row_tiles = 0;  // of a head
  std::int64_t ctas = 0;
  bool vector_q = false, vector_k = false, vector_v = false, vector_out = false;  // rows that are 16-byte aligned

  int shared_bytes() const { return shape.shared_bytes[stages - 1]; }
};

// How weights meet V.
Kind kind_of(const Problem& problem);
// The smallest compiled head dim that takes d and d_v.
int dim_of(const Problem& problem);

// Shared memory that the driver and the kernel's own description of its rows take of a multiprocessor's, per CTA.
inline constexpr int kReservedBytes = 2048;

ForwardPlan plan_forward(const Problem& problem, const TensorView& out, const DeviceFacts& device);

std::string to_string(const ForwardPlan& plan);

}  // namespace dspattn::cuda::general
