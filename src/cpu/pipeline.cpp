#include "cpu/pipeline.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "core/geometry.h"
#include "core/half.h"
#include "core/metadata.h"
#include "cpu/parallel.h"

namespace dspattn::cpu {
namespace {

constexpr int kBlock = 128;  // rows and keys of a block where there is no block mask; a multiple of every group
constexpr float kMasked = -std::numeric_limits<float>::infinity();

// The stored matrices of a shape: which blocks a block row holds, which key a place is, where its bytes are.
class Stored {
 public:
  Stored(const SparseMatrices& matrices, const BlockMaskView& blocks)
      : shape_(matrices.shape),
        blocks_(blocks),
        nonzeros_(matrices.nonzeros),
        metadata_(static_cast<std::uint16_t*>(matrices.metadata)),
        rows_(shape_.rows()),
        places_(shape_.places()),
        row_nonzeros_(shape_.nonzeros_per_row()),
        places_per_block_(32 / static_cast<std::int64_t>(size_bytes(shape_.dtype))) {}

  const SparseShape& shape() const { return shape_; }
  int block() const { return shape_.block > 0 ? shape_.block : kBlock; }
  std::int64_t rows() const { return rows_; }
  std::int64_t row_blocks() const { return (rows_ + block() - 1) / block(); }
  std::int64_t tasks() const { return shape_.matrices() * row_blocks(); }

  // Padding rows may begin a block row that the mask does not have: it holds nothing.
  std::int64_t slots(std::int64_t row_block) const {
    if (shape_.block == 0) return (places_ + kBlock - 1) / kBlock;
    if (row_block >= blocks_.counts.extent(0)) return 0;
    return static_cast<const std::int32_t*>(blocks_.counts.data)[row_block];
  }
  std::int64_t key_block(std::int64_t row_block, std::int64_t slot) const {
    if (shape_.block == 0) return slot;
    return static_cast<const std::int32_t*>(blocks_.columns.data)[row_block * blocks_.width() + slot];
  }
  std::int64_t slot_places(std::int64_t slot) const {
    return std::min<std::int64_t>(block(), places_ - slot * block());
  }

  // The key of a place of a key block, counted from the block's start.
  std::int64_t key_in_block(std::int64_t place) const {
    const int group = shape_.pattern.group;
    return key_at_place(place / group, static_cast<int>(place % group), group, shape_.grouping);
  }

  std::int64_t nonzero_index(std::int64_t matrix, std::int64_t row, std::int64_t place) const {
    return (matrix * rows_ + row) * row_nonzeros_ + place / 2;
  }
  double nonzero(std::int64_t index) const { return core::load_element(nonzeros_, shape_.dtype, index); }
  void set_nonzero(std::int64_t index, double value) const {
    core::store_element(nonzeros_, shape_.dtype, index, value);
  }

  // The metadata block of a place.
  std::uint16_t& metadata(std::int64_t matrix, std::int64_t row, std::int64_t place) const {
    const std::int64_t per_matrix = rows_ * (places_ / places_per_block_);
    return metadata_[matrix * per_matrix + core::block_offset({row, place / places_per_block_}, rows_)];
  }
  // Places of a code: four 2-byte or two 4-byte elements.
  std::int64_t places_per_code() const { return places_per_block_ / core::kCodesPerBlock; }
  std::int64_t places_per_block() const { return places_per_block_; }

 private:
  SparseShape shape_;
  BlockMaskView blocks_;
  void* nonzeros_;
  std::uint16_t* metadata_;
  std::int64_t rows_, places_, row_nonzeros_, places_per_block_;
};

struct BlockTask {
  std::int64_t matrix, batch, head, row_block;
};

BlockTask task_of(const Stored& stored, std::int64_t index) {
  BlockTask task{};
  task.matrix = index / stored.row_blocks();
  task.row_block = index % stored.row_blocks();
  task.batch = task.matrix / stored.shape().heads;
  task.head = task.matrix % stored.shape().heads;
  return task;
}

std::int64_t row_offset(const ConstTensorView& view, std::int64_t batch, std::int64_t head, std::int64_t row) {
  return batch * view.step(0) + head * view.step(1) + row * view.step(2);
}

std::int64_t mask_offset(const ConstTensorView& view, const BlockTask& task, std::int64_t row, std::int64_t key) {
  const std::array<std::int64_t, 4> index{task.batch, task.head, row, key};
  std::int64_t offset = 0;
  for (int dim = 0; dim < 4; ++dim) {
    if (view.extent(dim) > 1) offset += index[static_cast<std::size_t>(dim)] * view.step(dim);
  }
  return offset;
}

std::int64_t key_length_of(const ConstTensorView& lengths, std::int64_t batch, std::int64_t n_k) {
  if (!lengths.present()) return n_k;
  const auto length = static_cast<std::int64_t>(core::load_element(lengths.data, DType::i32, batch * lengths.step(0)));
  return std::clamp<std::int64_t>(length, 0, n_k);
}

// What qk_prune knows of the whole call.
struct ScoreCall {
  const QkPruneArgs& args;
  const Stored& stored;
  core::Band band;
  // Scores are held as (q.k + bias / scale) * unit: with biases a power of two not above the scale, so that bias /
  // scale
  // * unit is no larger than the bias.
  double unit = 1;
  double bias_factor = 1;  // unit / scale
  float scale = 1;         // of a score in these units
  float key_scale = 1;     // what makes it the selection key of 16-bit types
  bool rounds_keys = false;
};

// Scores before scaling of one row against a block of keys, `columns` [d][kBlock] holding the keys in place order.
void row_products(const std::vector<float>& query, const std::vector<float>& columns, std::array<float, kBlock>& sums) {
  sums.fill(0);
  for (std::size_t c = 0; c < query.size(); ++c) {
    const float factor = query[c];
    const float* column = columns.data() + c * kBlock;
    for (std::size_t p = 0; p < kBlock; ++p) sums[p] += factor * column[p];
  }
}

// Adds the bias, and marks what the row may not see. A finite bias stays finite, and so does its sum with a finite
// product: the lowest number, as models write masks, is not -inf.
void apply_mask(const ScoreCall& call, const BlockTask& task, std::int64_t row, std::int64_t first_key,
                const std::array<std::int64_t, kBlock>& keys, std::int64_t places, std::array<float, kBlock>& sums) {
  const QkPruneArgs& args = call.args;
  const SparseShape& shape = call.stored.shape();
  core::KeyRange range;
  if (row < shape.n_q) {
    range = call.band.row(row, shape.n_q, shape.n_k, key_length_of(args.mask.key_lengths, task.batch, shape.n_k));
  }
  for (std::int64_t p = 0; p < places; ++p) {
    const auto i = static_cast<std::size_t>(p);
    const std::int64_t key = first_key + keys[i];
    bool visible = key >= range.begin && key < range.end;
    if (visible && args.mask.allowed.present()) {
      visible =
          core::load_element(args.mask.allowed.data, DType::b8, mask_offset(args.mask.allowed, task, row, key)) != 0;
    }
    if (visible && args.mask.bias.present()) {
      const double bias =
          core::load_element(args.mask.bias.data, args.mask.bias.dtype, mask_offset(args.mask.bias, task, row, key));
      visible = bias != static_cast<double>(kMasked);
      constexpr double kLargest = std::numeric_limits<float>::max();
      const double sum = static_cast<double>(sums[i]) * call.unit + bias * call.bias_factor;
      sums[i] = static_cast<float>(std::isfinite(sum) ? std::clamp(sum, -kLargest, kLargest) : sum);
    }
    if (!visible) sums[i] = kMasked;
  }
}

// A score as it is compared; masked (-inf) stays so.
float compared(const ScoreCall& call, float score) {
  if (!call.rounds_keys || score == kMasked) return score;
  const double scaled = static_cast<double>(score) * static_cast<double>(call.key_scale);
  if (std::isnan(scaled)) return score;
  return static_cast<float>(core::round_to_f16(std::clamp(scaled, -core::kMaxF16, core::kMaxF16)));
}

// A finite score stays finite in the type it is stored in: its largest number neither masks nor makes a row undefined.
double stored_score(const ScoreCall& call, float score) {
  const double scaled = static_cast<double>(score) * static_cast<double>(call.scale);
  if (!std::isfinite(scaled)) return scaled;
  const double largest = core::largest_of(call.stored.shape().dtype);
  return std::clamp(scaled, -largest, largest);
}

// NaN counts as largest, so that its row becomes NaN; ties keep the lower index.
bool beats(float candidate, float kept) { return std::isnan(candidate) ? !std::isnan(kept) : candidate > kept; }

// Which two of four (keep 2) or which one of each two pairs (keep 1): the slots of a code of 16-bit elements.
std::array<int, 2> kept_of_four(const float* keys, int keep) {
  if (keep == 1) return {beats(keys[1], keys[0]) ? 1 : 0, beats(keys[3], keys[2]) ? 3 : 2};
  std::array<int, 4> order{0, 1, 2, 3};
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return beats(keys[a], keys[b]); });
  return {std::min(order[0], order[1]), std::max(order[0], order[1])};
}

// Selects, encodes and stores `places` scores of a row, from place `first_place` of the matrix on.
void prune_row(const ScoreCall& call, const BlockTask& task, std::int64_t row, std::int64_t first_place,
               std::int64_t places, const std::array<float, kBlock>& sums) {
  const Stored& stored = call.stored;
  std::array<float, kBlock> keys{};
  for (std::size_t p = 0; p < static_cast<std::size_t>(places); ++p) keys[p] = compared(call, sums[p]);
  const std::int64_t step = stored.places_per_code();
  std::uint32_t block = 0;
  for (std::int64_t p = 0; p < places; p += step) {
    const float* group = keys.data() + p;
    const float* scores = sums.data() + p;
    const std::int64_t index = stored.nonzero_index(task.matrix, row, first_place + p);
    std::uint32_t code = 0;
    if (step == 4) {
      const auto [first, second] = kept_of_four(group, stored.shape().pattern.keep);
      code = core::code_of_two_four(first, second);
      stored.set_nonzero(index, stored_score(call, scores[first]));
      stored.set_nonzero(index + 1, stored_score(call, scores[second]));
    } else {
      const int kept = beats(group[1], group[0]) ? 1 : 0;
      code = core::code_of_one_two(kept);
      stored.set_nonzero(index, stored_score(call, scores[kept]));
    }
    const std::int64_t in_block = p % stored.places_per_block() / step;
    block |= code << (4 * in_block);
    if (in_block == core::kCodesPerBlock - 1) {
      stored.metadata(task.matrix, row, first_place + p) = static_cast<std::uint16_t>(block);
      block = 0;
    }
  }
}

void prune_block_row(const ScoreCall& call, std::int64_t index) {
  const QkPruneArgs& args = call.args;
  const Stored& stored = call.stored;
  const SparseShape& shape = stored.shape();
  const BlockTask task = task_of(stored, index);
  const auto d = static_cast<std::size_t>(args.q.extent(3));
  const std::int64_t kv_head = task.head / (shape.heads / args.k.extent(1));
  std::vector<float> columns(d * kBlock, 0.0f);
  std::vector<float> query(d);
  std::array<float, kBlock> sums{};
  std::array<std::int64_t, kBlock> keys{};
  for (std::int64_t slot = 0; slot < stored.slots(task.row_block); ++slot) {
    const std::int64_t first_key = stored.key_block(task.row_block, slot) * stored.block();
    const std::int64_t places = stored.slot_places(slot);
    for (std::int64_t p = 0; p < places; ++p) {
      keys[static_cast<std::size_t>(p)] = stored.key_in_block(p);
      const std::int64_t key = first_key + keys[static_cast<std::size_t>(p)];
      const std::int64_t offset = key < shape.n_k ? row_offset(args.k, task.batch, kv_head, key) : -1;
      for (std::size_t c = 0; c < d; ++c) {
        columns[c * kBlock + static_cast<std::size_t>(p)] =
            offset < 0 ? 0.0f
                       : static_cast<float>(
                             core::load_element(args.k.data, args.k.dtype, offset + static_cast<std::int64_t>(c)));
      }
    }
    const std::int64_t end = std::min((task.row_block + 1) * stored.block(), stored.rows());
    for (std::int64_t row = task.row_block * stored.block(); row < end; ++row) {
      const std::int64_t offset = row < shape.n_q ? row_offset(args.q, task.batch, task.head, row) : -1;
      for (std::size_t c = 0; c < d; ++c) {
        query[c] = offset < 0 ? 0.0f
                              : static_cast<float>(core::load_element(args.q.data, args.q.dtype,
                                                                      offset + static_cast<std::int64_t>(c)));
      }
      row_products(query, columns, sums);
      apply_mask(call, task, row, first_key, keys, places, sums);
      prune_row(call, task, row, slot * stored.block(), places, sums);
    }
  }
}

}  // namespace

void qk_prune(const QkPruneArgs& args) {
  const Stored stored(args.scores, args.blocks);
  ScoreCall call{args, stored, core::band_of(args.mask)};
  const double d = static_cast<double>(std::max<std::int64_t>(args.q.extent(3), 1));
  const double scale = args.scale.value_or(1.0 / std::sqrt(d));
  const double selection = core::selection_scale(scale);
  if (args.mask.bias.present()) call.unit = std::min(1.0, selection);
  call.bias_factor = call.unit / scale;
  call.scale = static_cast<float>(scale / call.unit);
  call.rounds_keys = args.q.dtype != DType::f32;
  call.key_scale = static_cast<float>(selection / call.unit);
  parallel_for(stored.tasks(), args.run, [&](std::int64_t index) { prune_block_row(call, index); });
}

void nonzero_softmax(const SoftmaxArgs& args) {
  const Stored stored(args.matrices, args.blocks);
  parallel_for(stored.tasks(), args.run, [&](std::int64_t index) {
    const BlockTask task = task_of(stored, index);
    const std::int64_t count =
        std::min(stored.slots(task.row_block) * stored.block() / 2, stored.shape().nonzeros_per_row());
    const std::int64_t end = std::min((task.row_block + 1) * stored.block(), stored.rows());
    std::vector<double> weights(static_cast<std::size_t>(count));
    for (std::int64_t row = task.row_block * stored.block(); row < end; ++row) {
      const std::int64_t first = stored.nonzero_index(task.matrix, row, 0);
      double maximum = -std::numeric_limits<double>::infinity();
      for (std::int64_t i = 0; i < count; ++i) {
        weights[static_cast<std::size_t>(i)] = stored.nonzero(first + i);
        maximum = std::max(maximum, weights[static_cast<std::size_t>(i)]);
      }
      const double reference = std::isinf(maximum) && maximum < 0 ? 0.0 : maximum;
      double sum = 0;
      for (double& weight : weights) sum += weight = std::exp(weight - reference);
      for (std::int64_t i = 0; i < count; ++i) {
        stored.set_nonzero(first + i, sum == 0 ? 0.0 : weights[static_cast<std::size_t>(i)] / sum);
      }
      if (args.lse.present() && row < stored.shape().n_q) {
        core::store_element(args.lse.data, DType::f32,
                            task.batch * args.lse.step(0) + task.head * args.lse.step(1) + row * args.lse.step(2),
                            sum == 0 ? -std::numeric_limits<double>::infinity() : reference + std::log(sum));
      }
    }
  });
}

namespace {

// Adds the products of one row's nonzeros of a slot with the block's values, [place][d_v], to `sums`.
void accumulate_row(const Stored& stored, const BlockTask& task, std::int64_t row, std::int64_t slot, std::size_t d_v,
                    const std::vector<float>& values, std::vector<float>& sums) {
  const std::int64_t first_place = slot * stored.block();
  const std::int64_t step = stored.places_per_code();
  for (std::int64_t p = 0; p < stored.slot_places(slot); p += step) {
    const std::uint32_t block = stored.metadata(task.matrix, row, first_place + p);
    const std::uint32_t code = core::code_in_block(block, static_cast<int>(p % stored.places_per_block() / step));
    const std::int64_t index = stored.nonzero_index(task.matrix, row, first_place + p);
    for (std::int64_t kept = 0; kept < step / 2; ++kept) {
      const auto weight = static_cast<float>(stored.nonzero(index + kept));
      if (weight == 0.0f) continue;  // a masked key, whatever its value row holds
      const int slot_of_code = kept == 0 ? core::lower_slot(code) : core::upper_slot(code);
      const std::int64_t element = step == 4 ? slot_of_code : slot_of_code / 2;
      const float* value = values.data() + static_cast<std::size_t>(p + element) * d_v;
      for (std::size_t c = 0; c < d_v; ++c) sums[c] += weight * value[c];
    }
  }
}

void multiply_block_row(const PvSparseArgs& args, const Stored& stored, std::int64_t index) {
  const SparseShape& shape = stored.shape();
  const BlockTask task = task_of(stored, index);
  const auto d_v = static_cast<std::size_t>(args.v.extent(3));
  const std::int64_t kv_head = task.head / (shape.heads / args.v.extent(1));
  const std::int64_t key_length = key_length_of(args.key_lengths, task.batch, shape.n_k);
  const std::int64_t first_row = task.row_block * stored.block();
  const std::int64_t rows = std::min(first_row + stored.block(), shape.n_q) - first_row;
  std::vector<std::vector<float>> sums(static_cast<std::size_t>(std::max<std::int64_t>(rows, 0)),
                                       std::vector<float>(d_v, 0.0f));
  std::vector<float> values(static_cast<std::size_t>(stored.block()) * d_v);
  for (std::int64_t slot = 0; slot < stored.slots(task.row_block); ++slot) {
    for (std::int64_t p = 0; p < stored.slot_places(slot); ++p) {
      const std::int64_t key = stored.key_block(task.row_block, slot) * stored.block() + stored.key_in_block(p);
      const std::int64_t offset = row_offset(args.v, task.batch, kv_head, key);
      for (std::size_t c = 0; c < d_v; ++c) {
        values[static_cast<std::size_t>(p) * d_v + c] =
            key >= key_length ? 0.0f
                              : static_cast<float>(core::load_element(args.v.data, args.v.dtype,
                                                                      offset + static_cast<std::int64_t>(c)));
      }
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      accumulate_row(stored, task, first_row + row, slot, d_v, values, sums[static_cast<std::size_t>(row)]);
    }
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t offset = row_offset(args.out, task.batch, task.head, first_row + row);
    for (std::size_t c = 0; c < d_v; ++c) {
      core::store_element(args.out.data, args.out.dtype, offset + static_cast<std::int64_t>(c),
                          static_cast<double>(sums[static_cast<std::size_t>(row)][c]));
    }
  }
}

}  // namespace

void pv_sparse(const PvSparseArgs& args) {
  const Stored stored(args.weights, args.blocks);
  parallel_for(stored.tasks(), args.run, [&](std::int64_t index) { multiply_block_row(args, stored, index); });
}

}  // namespace dspattn::cpu
