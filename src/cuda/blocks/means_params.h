// What is told to the kernels that write means of V (means.h), and to those that read them: no word of CUDA's own, so
// that plans and their tests need none of its headers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/blocks/pages.h"
#include "cuda/blocks/views.h"
#include "cuda/blocks/work_params.h"
#include "cuda/tile/means.h"
#include "dspattn/dtype.h"

namespace dspattn::cuda::blocks {

// Decided on the host (means_plan.h).
struct MeansPlan {
  bool present = false;  // rest = mean
  tile::MeanTable table;
  std::int64_t heads = 0;          // that have means of their own: the key heads, or all
  int columns = 0;                 // floats of an entry
  std::size_t begin = 0, end = 0;  // in the workspace
  // The kernel that reads the table writes it too, in these tasks; what it needs for that, in the workspace.
  bool own = false;
  tile::MeanTasks tasks;
  std::size_t counts = 0, count_bytes = 0, sums = 0;
};

// The table as a kernel reads it: [heads][entries][columns] fp32, of the key heads, or of all heads where masks differ
// from head to head.
struct MeansView {
  const float* data = nullptr;  // null: rest = drop
  tile::MeanTable table;
  tile::Divisor heads_per_mean{};  // query heads that share an entry
};

// For a kernel that writes the table itself (means_writer.h).
struct OwnMeans {
  std::int32_t* counts = nullptr;  // tasks taken, then those done of every group; 0 before. Null: others write it
  float* means = nullptr;          // the table
  float* sums = nullptr;           // MeanTasks::sums_of()
  tile::MeanTasks tasks;

  DSPATTN_HOST_DEVICE constexpr std::int32_t* taken() const { return counts; }
  DSPATTN_HOST_DEVICE constexpr std::int32_t* done(int group) const { return counts + 1 + group; }
  // What a group's count is when its means are written: all tasks, and that their sums are added up.
  DSPATTN_HOST_DEVICE constexpr std::int32_t complete() const { return tasks.of_head.value + 1; }
};

struct MeansParams {
  RowsView v;
  Pages pages;
  DType type = DType::bf16;
  int columns = 0;                     // d_v
  int vector = 0;                      // 1: rows of V are 16-byte aligned
  int heads = 0;                       // that have means of their own
  tile::Divisor heads_per_key_head{};  // of these
  MaskTensor allowed, bias;            // with one query row
  int bias_bytes = 0;
  WorkParams work;  // lengths and band
  int sequences = 0;
  tile::MeanTable table;
  int stride = 0;          // floats of an entry: the columns, filled up with zeros
  float* means = nullptr;  // [heads][table.entries][stride]
  float* sums = nullptr;   // [heads][table.all_blocks][stride]: of every whole block,
  int* counts = nullptr;   // [heads][table.all_blocks]: and of how many keys
};

}  // namespace dspattn::cuda::blocks
