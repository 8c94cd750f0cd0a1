// A problem resolved for the CPU kernels: pointers, strides in bytes, masks, and how the work is cut into tasks.
//
// The query rows of one sequence that share a kv head are laid out as one list, row = i * group_heads + head within the
// group: neighbours in the list are neighbours in position, so that tiles of grouped-query attention are full even when
// a sequence has one query, and causal tiles still end close to their diagonal.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "core/geometry.h"
#include "cpu/tile.h"
#include "dspattn/attention.h"

namespace dspattn::cpu {

// A tensor whose last dimension is contiguous, addressed by (batch, head, row).
struct Rows {
  const unsigned char* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t batch_bytes = 0;
  std::int64_t head_bytes = 0;
  std::int64_t row_bytes = 0;

  Rows() = default;
  explicit Rows(const ConstTensorView& view);
  const unsigned char* at(std::int64_t batch, std::int64_t head, std::int64_t row) const {
    return data + batch * batch_bytes + head * head_bytes + row * row_bytes;
  }
  unsigned char* writable_at(std::int64_t batch, std::int64_t head, std::int64_t row) const {
    return const_cast<unsigned char*>(at(batch, head, row));  // NOLINT: made from a mutable view
  }
};

// `allowed` or `bias`, broadcast where its extent is 1. Strides in bytes.
struct MaskTensor {
  const unsigned char* data = nullptr;
  DType dtype = DType::b8;
  std::int64_t stride[4] = {};

  MaskTensor() = default;
  explicit MaskTensor(const ConstTensorView& view);
  bool present() const { return data != nullptr; }
  // Whether all rows of a (sequence, kv head) see the same values.
  bool same_for_rows(std::int64_t group_heads) const { return stride[2] == 0 && (stride[1] == 0 || group_heads == 1); }
};

struct SequenceSpan {
  std::int64_t index = 0;    // for masks and lengths
  std::int64_t batch = 0;    // for tensors: 0 in a packed batch
  std::int64_t q_begin = 0;  // first row in q; 0 unless packed
  std::int64_t k_begin = 0;
  std::int64_t n_q = 0;
  std::int64_t n_k = 0;
  std::int64_t key_length = core::kUnbounded;
};

// Rows [begin, end) of the list of one (sequence, kv head).
struct Task {
  std::int64_t sequence = 0;
  std::int64_t kv_head = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Dropout with its numbers read: of those of the call or of its state.
struct DropoutJob {
  bool active = false;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  std::uint32_t threshold = 0;  // weights whose bits lie below it are dropped
  float kept_factor = 1;        // of the others

  DropoutJob() = default;
  explicit DropoutJob(const Dropout& dropout);
};

struct Job {
  explicit Job(const Problem& problem);

  SequenceSpan sequence(std::int64_t index) const;
  std::int64_t rows_of(const SequenceSpan& sequence) const { return sequence.n_q * group_heads; }
  // Every row of the problem, in tasks of at most `rows` rows (a multiple of kTileQ), the last rows of a sequence
  // first: under a causal mask these are the long ones.
  std::vector<Task> tasks(std::int64_t rows) const;
  std::int64_t task_count(std::int64_t rows) const;  // how many that would be
  // The factor of a score in powers of two.
  float scale_log2() const { return static_cast<float>((soft_cap > 0 ? 1.0 : g.scale / unit) * 1.4426950408889634); }
  // The logit of a head's sink; -inf without one.
  float sink(std::int64_t head) const {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    return sinks.present() ? static_cast<const float*>(sinks.data)[head * sinks.step(0)] : kNone;
  }

  core::Geometry g;
  core::Band band;
  Pattern pattern;
  Grouping grouping;
  Rows q, k, v;
  MaskTensor allowed, bias;
  ConstTensorView key_lengths, cu_q, cu_k;
  std::int64_t group_heads = 1;
  int block_keys = kTileK;  // keys per block: the largest multiple of the group that fits
  // Kernels hold scores as (q.k + bias / scale) * unit. The unit is 1, or with biases a power of two not above the
  // scale: bias / scale * unit is then no larger than the bias, however small the scale.
  double unit = 1;
  // With a soft cap (0: none) these units are those of the choice only: the scores that are weighed are S itself.
  float soft_cap = 0;
  float scale = 1;        // of a score that is weighed
  float half_factor = 1;  // what makes it the 16-bit selection key, a power of two
  bool half_keys = false;
  DropoutJob dropout;
  ConstTensorView sinks;
};

// The rows of one tile: where they come from and which keys they may see. Rows past `rows` repeat the last one.
struct TileRows {
  int rows = 0;
  std::int64_t head[kTileQ];
  std::int64_t position[kTileQ];  // i within the sequence
  std::int64_t begin[kTileQ];
  std::int64_t end[kTileQ];
  std::int64_t least_begin = 0, most_begin = 0;
  std::int64_t least_end = 0, most_end = 0;
  std::uint32_t dropout[kTileQ];  // each row's random state, where dropout is active

  // Rows [first, last) of the list of a kv head, as many as a tile has.
  void set(const Job& job, const SequenceSpan& sequence, std::int64_t kv_head, std::int64_t first, std::int64_t last);
  // Queries [first, last) of one head.
  void set_head(const Job& job, const SequenceSpan& sequence, std::int64_t of_head, std::int64_t first,
                std::int64_t last);

 private:
  void find_keys(const Job& job, const SequenceSpan& sequence);
};

}  // namespace dspattn::cpu
