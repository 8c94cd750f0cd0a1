// How the general forward kernel will serve a problem: every decision of the host, a pure function of problem and
// device, printed by `dspattn kernels`. Launching only fills parameters from a plan.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/blocks/means_params.h"
#include "cuda/device/facts.h"
#include "cuda/general/config.h"
#include "cuda/tile/group_rows.h"
#include "cuda/tile/walk.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::general {

// What an instance was compiled with.
struct Shape {
  int dim = 0;  // head dim
  int warp_rows = 0, tile_k = 0;
  int warps = 0, most_warps = 0;  // of a CTA
  int ctas = 2;                   // of `warps` a multiprocessor, as far as registers go
  bool takes_items = false;       // a CTA may take several items
  int least_stages = 1;           // 0: K and V may take turns in one place
  int own_bytes = 0;              // of shared memory, for the description of a CTA's rows
  int warp_q_bytes = 0;           // dynamic: a warp's
  int warp_given_bytes = 0;       // the same, of what it gives its neighbour
  int key_bytes[3] = {};          // by stages of K and V

  int shared_bytes(int of_warps, int stages) const {
    return of_warps * (warp_q_bytes + (stages > 0 ? warp_given_bytes : 0)) + key_bytes[stages];
  }
};

Shape shape_of(DType type, Kind kind, Scope scope, int dim);

struct ForwardPlan {
  Kind kind = Kind::any;
  Scope scope = Scope::plain;
  Shape shape;
  int warps = 4;
  int stages = 1;        // of K and V
  int resident = 1;      // CTAs of a multiprocessor, as far as registers and shared memory go
  int shared_bytes = 0;  // dynamic
  int row_tiles = 0;     // of a head, or of heads that choose together
  int column_parts = 1;
  tile::GroupRows group;
  tile::ItemOrder order;  // an item is a row tile
  std::int64_t ctas = 0;
  bool vector_q = false, vector_k = false, vector_v = false, vector_out = false;  // rows that are 16-byte aligned

  blocks::MeansPlan means;  // rest = mean
  // Heads that choose together: a kernel before, for the totals of all visible scores.
  bool together = false;
  std::size_t totals_begin = 0;  // in the workspace, behind the means
  std::size_t workspace_bytes = 0;

  int tile_q() const { return warps * shape.warp_rows; }
  int threads() const { return 32 * warps; }
};

// What the problem asks of an instance, and how weights meet V there.
Scope scope_of(const Problem& problem);
Kind kind_of(const Problem& problem, Scope scope);
// The smallest compiled head dim that takes d and d_v.
int dim_of(const Problem& problem);
// The one that an instance of a scope has for it.
int compiled_dim(Scope scope, int dim);

// Shared memory that the driver takes of a multiprocessor's, per CTA.
inline constexpr int kReservedBytes = 1024;

// `least`: by an instance of this scope, though the problem may ask for less.
ForwardPlan plan_forward(const Problem& problem, const TensorView& out, const DeviceFacts& device,
                         Scope least = Scope::plain);

// The problem whose totals heads that choose together need: theirs, dense, and nothing besides.
Problem dense_problem(const Problem& problem);

// The band that rows see. The diagonal's offset is a part of its bounds: any offset then fits 32 bits.
struct Reach {
  int left = 0, right = 0;
};
Reach reach_of(const Mask& mask);

std::string to_string(const ForwardPlan& plan);

}  // namespace dspattn::cuda::general
