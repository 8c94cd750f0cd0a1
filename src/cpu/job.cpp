#include "cpu/job.h"

#include <algorithm>

#include "core/dropout.h"

namespace dspattn::cpu {

Rows::Rows(const ConstTensorView& view) : data(static_cast<const unsigned char*>(view.data)), dtype(view.dtype) {
  const std::int64_t bytes = static_cast<std::int64_t>(size_bytes(view.dtype));
  batch_bytes = view.step(0) * bytes;
  head_bytes = view.step(1) * bytes;
  row_bytes = view.step(2) * bytes;
}

MaskTensor::MaskTensor(const ConstTensorView& view)
    : data(static_cast<const unsigned char*>(view.data)), dtype(view.dtype) {
  const std::int64_t bytes = static_cast<std::int64_t>(size_bytes(view.dtype));
  for (int dim = 0; dim < 4; ++dim) stride[dim] = view.extent(dim) == 1 ? 0 : view.step(dim) * bytes;
}

DropoutJob::DropoutJob(const Dropout& dropout)
    : active(dropout.probability > 0),
      seed(dropout.seed),
      offset(dropout.offset),
      threshold(core::dropout_threshold(dropout.probability)),
      kept_factor(static_cast<float>(1 / (1 - dropout.probability))) {
  if (!active || !dropout.state.present()) return;
  const auto word = [&](std::int64_t index) {
    return std::uint64_t{static_cast<const std::uint32_t*>(dropout.state.data)[index * dropout.state.step(0)]};
  };
  seed = word(0) | word(1) << 32;
  offset = word(2) | word(3) << 32;
}

Job::Job(const Problem& problem)
    : g(core::geometry_of(problem)),
      band(core::band_of(problem.mask)),
      pattern(problem.pattern),
      grouping(problem.grouping),
      q(problem.q),
      k(problem.k),
      v(problem.v),
      key_lengths(problem.mask.key_lengths),
      soft_cap(static_cast<float>(problem.soft_cap.value_or(0))),
      dropout(problem.dropout),
      sinks(problem.sinks) {
  if (problem.mask.allowed.present()) allowed = MaskTensor(problem.mask.allowed);
  if (problem.mask.bias.present()) bias = MaskTensor(problem.mask.bias);
  if (problem.packed) {
    cu_q = problem.packed->cu_q;
    cu_k = problem.packed->cu_k;
  }
  group_heads = g.kv_heads == 0 ? 1 : g.heads / g.kv_heads;
  block_keys = grouping == Grouping::interleaved ? kTileK : kTileK / pattern.group * pattern.group;
  const double selection = core::selection_scale(g.scale);
  if (bias.present()) unit = std::min(1.0, selection);
  scale = soft_cap > 0 ? 1.0f : static_cast<float>(g.scale / unit);
  half_factor = static_cast<float>(selection / unit);
  half_keys = problem.q.dtype != DType::f32;
}

SequenceSpan Job::sequence(std::int64_t index) const {
  const auto entry = [](const ConstTensorView& view, std::int64_t i) {
    return std::int64_t{static_cast<const std::int32_t*>(view.data)[i * view.step(0)]};
  };
  SequenceSpan s;
  s.index = index;
  s.n_q = g.n_q;
  s.n_k = g.n_k;
  if (g.packed) {
    s.q_begin = entry(cu_q, index);
    s.k_begin = entry(cu_k, index);
    s.n_q = entry(cu_q, index + 1) - s.q_begin;
    s.n_k = entry(cu_k, index + 1) - s.k_begin;
  } else {
    s.batch = index;
  }
  if (key_lengths.present()) s.key_length = std::max<std::int64_t>(0, entry(key_lengths, index));
  return s;
}

std::int64_t Job::task_count(std::int64_t rows) const {
  std::int64_t count = 0;
  for (std::int64_t b = 0; b < g.batch; ++b) count += g.kv_heads * ((rows_of(sequence(b)) + rows - 1) / rows);
  return count;
}

std::vector<Task> Job::tasks(std::int64_t rows) const {
  std::vector<Task> list;
  list.reserve(static_cast<std::size_t>(task_count(rows)));
  for (std::int64_t b = 0; b < g.batch; ++b) {
    const std::int64_t total = rows_of(sequence(b));
    for (std::int64_t head = 0; head < g.kv_heads; ++head) {
      for (std::int64_t begin = (total - 1) / rows * rows; total > 0 && begin >= 0; begin -= rows) {
        list.push_back({b, head, begin, std::min(begin + rows, total)});
      }
    }
  }
  return list;
}

void TileRows::set(const Job& job, const SequenceSpan& sequence, std::int64_t kv_head, std::int64_t first,
                   std::int64_t last) {
  rows = static_cast<int>(std::min<std::int64_t>(last - first, kTileQ));
  for (int r = 0; r < kTileQ; ++r) {
    const std::int64_t row = first + std::min(r, rows - 1);
    head[r] = kv_head * job.group_heads + row % job.group_heads;
    position[r] = row / job.group_heads;
  }
  find_keys(job, sequence);
}

void TileRows::set_head(const Job& job, const SequenceSpan& sequence, std::int64_t of_head, std::int64_t first,
                        std::int64_t last) {
  rows = static_cast<int>(std::min<std::int64_t>(last - first, kTileQ));
  for (int r = 0; r < kTileQ; ++r) {
    head[r] = of_head;
    position[r] = first + std::min(r, rows - 1);
  }
  find_keys(job, sequence);
}

void TileRows::find_keys(const Job& job, const SequenceSpan& sequence) {
  for (int r = 0; r < kTileQ; ++r) {
    const core::KeyRange range = job.band.row(position[r], sequence.n_q, sequence.n_k, sequence.key_length);
    begin[r] = range.begin;
    end[r] = range.end;
    if (!job.dropout.active) continue;
    dropout[r] = core::DropoutRow::of(job.dropout.seed, job.dropout.offset, static_cast<std::uint32_t>(sequence.index),
                                      static_cast<std::uint32_t>(head[r]), static_cast<std::uint32_t>(position[r]))
                     .state;
  }
  const auto [low_begin, high_begin] = std::minmax_element(begin, begin + kTileQ);
  const auto [low_end, high_end] = std::minmax_element(end, end + kTileQ);
  least_begin = *low_begin;
  most_begin = *high_begin;
  least_end = *low_end;
  most_end = *high_end;
}

}  // namespace dspattn::cpu
