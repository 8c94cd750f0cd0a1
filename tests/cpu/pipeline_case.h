// A problem for the pipeline's three functions, run on any device, and the oracle's view of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "api/device_memory.h"
#include "core/half.h"
#include "core/metadata.h"
#include "cpu/reference.h"
#include "dspattn/pipeline.h"

namespace dspattn::test {

struct PipelineCase {
  DType dtype = DType::bf16;
  Pattern pattern{2, 4};
  Grouping grouping = Grouping::consecutive;
  std::int64_t batch = 1, heads = 1, kv_heads = 1, n_q = 64, n_k = 64, d = 64, d_v = 64;
  bool causal = false;
  bool integers = true;  // small integers: every sum is exact, so the selection is, too
  std::vector<std::int32_t> key_lengths{};
  std::vector<std::vector<std::int32_t>> blocks{};  // of a block mask; empty: none
  int block = 64;
  bool bias = false;
  std::uint32_t seed = 1;
};

struct PipelineResult {
  std::vector<std::byte> scores, weights;  // nonzeros before and after the softmax
  std::vector<std::uint16_t> metadata;
  std::vector<std::byte> out;
  std::vector<float> lse;
};

class PipelineProblem {
 public:
  explicit PipelineProblem(const PipelineCase& drawn) : c(drawn) {
    std::mt19937 engine(c.seed);
    const auto fill = [&](std::vector<std::byte>& data, std::int64_t count, int largest) {
      data.resize(static_cast<std::size_t>(count) * size_bytes(c.dtype));
      std::uniform_int_distribution<int> whole(-largest, largest);
      std::normal_distribution<double> normal;
      for (std::int64_t i = 0; i < count; ++i) {
        core::store_element(data.data(), c.dtype, i, c.integers ? whole(engine) : normal(engine));
      }
    };
    fill(q, c.batch * c.heads * c.n_q * c.d, 2);
    fill(k, c.batch * c.kv_heads * c.n_k * c.d, 2);
    fill(v, c.batch * c.kv_heads * c.n_k * c.d_v, 3);
    if (c.bias) {
      std::uniform_int_distribution<int> whole(-4, 4);
      bias.resize(static_cast<std::size_t>(c.heads * c.n_q * c.n_k));
      for (float& value : bias) value = static_cast<float>(whole(engine)) * 0.25f;
      for (std::size_t i = 0; i < bias.size(); i += 7) bias[i] = -INFINITY;
    }
    if (!c.blocks.empty()) mask = make_block_mask(c.n_q, c.n_k, c.block, c.blocks);
    allowed.resize(static_cast<std::size_t>(c.n_q * c.n_k), 1);
    for (std::int64_t i = 0; i < c.n_q && !c.blocks.empty(); ++i) {
      for (std::int64_t j = 0; j < c.n_k; ++j) {
        allowed[static_cast<std::size_t>(i * c.n_k + j)] = mask.allows(i, j) ? 1 : 0;
      }
    }
  }

  SparseShape shape() const {
    SparseShape s{c.dtype, c.pattern, c.grouping, c.batch, c.heads, c.n_q, c.n_k};
    if (!c.blocks.empty()) {
      s.block = c.block;
      s.width = mask.width;
    }
    return s;
  }

  // The problem for the oracle: the block mask as a boolean one.
  Problem oracle_problem() const {
    Problem p;
    p.q = {q.data(), c.dtype, {c.batch, c.heads, c.n_q, c.d}};
    p.k = {k.data(), c.dtype, {c.batch, c.kv_heads, c.n_k, c.d}};
    p.v = {v.data(), c.dtype, {c.batch, c.kv_heads, c.n_k, c.d_v}};
    p.pattern = c.pattern;
    p.grouping = c.grouping;
    p.mask.causal = c.causal;
    if (!c.key_lengths.empty()) p.mask.key_lengths = {c.key_lengths.data(), DType::i32, {c.batch}};
    if (!c.blocks.empty()) p.mask.allowed = {allowed.data(), DType::b8, {1, 1, c.n_q, c.n_k}};
    if (c.bias) p.mask.bias = {bias.data(), DType::f32, {1, c.heads, c.n_q, c.n_k}};
    return p;
  }

  // Runs the three functions, or the chain (scores, weights and metadata are then empty).
  PipelineResult run(Device device, bool chained = false) const {
    core::DeviceMemory& memory = api::memory_of(device);
    const auto upload = [&](const void* data, std::size_t bytes) {
      core::DeviceBuffer buffer(memory, bytes);
      if (bytes > 0) buffer.upload(data);
      return buffer;
    };
    const core::DeviceBuffer dq = upload(q.data(), q.size()), dk = upload(k.data(), k.size()),
                             dv = upload(v.data(), v.size()), dbias = upload(bias.data(), bias.size() * 4),
                             dlengths = upload(c.key_lengths.data(), c.key_lengths.size() * 4),
                             dcounts = upload(mask.counts.data(), mask.counts.size() * 4),
                             dcolumns = upload(mask.columns.data(), mask.columns.size() * 4);
    const SparseShape s = shape();
    PipelineResult r;
    r.scores.resize(s.nonzeros_bytes());
    r.metadata.resize(s.metadata_bytes() / 2);
    r.out.resize(static_cast<std::size_t>(c.batch * c.heads * c.n_q * c.d_v) * size_bytes(c.dtype));
    r.lse.resize(static_cast<std::size_t>(c.batch * c.heads * c.n_q));
    // Poisoned: what is not written shows.
    const std::vector<std::byte> poison(std::max({r.scores.size(), r.metadata.size() * 2, r.out.size()}),
                                        std::byte{0xFF});
    const core::DeviceBuffer nonzeros = upload(poison.data(), r.scores.size()),
                             metadata = upload(poison.data(), r.metadata.size() * 2),
                             dout = upload(poison.data(), r.out.size()), dlse(memory, r.lse.size() * 4);
    BlockMaskView blocks;
    if (!c.blocks.empty()) {
      blocks.block = c.block;
      blocks.counts = {dcounts.data(), DType::i32, {mask.block_rows()}};
      blocks.columns = {dcolumns.data(), DType::i32, {mask.block_rows(), mask.width}};
    }
    Problem p = oracle_problem();
    p.device = device;
    p.q.data = dq.data();
    p.k.data = dk.data();
    p.v.data = dv.data();
    p.mask.allowed = {};
    if (c.bias) p.mask.bias.data = dbias.data();
    if (!c.key_lengths.empty()) p.mask.key_lengths.data = dlengths.data();
    const TensorView out(dout.data(), c.dtype, {c.batch, c.heads, c.n_q, c.d_v});
    const TensorView lse(dlse.data(), DType::f32, {c.batch, c.heads, c.n_q});
    if (chained) {
      ForwardArgs args{p, out, lse, {}};
      const core::DeviceBuffer workspace(memory, pipeline_workspace_bytes(args, blocks));
      args.run.workspace = workspace.data();
      args.run.workspace_bytes = workspace.bytes();
      pipeline_forward(args, blocks);
    } else {
      const SparseMatrices matrices{s, nonzeros.data(), metadata.data()};
      qk_prune({.device = device,
                .q = p.q,
                .k = p.k,
                .mask = p.mask,
                .scale = {},
                .blocks = blocks,
                .scores = matrices,
                .run = {}});
      nonzeros.download(r.scores.data());
      nonzero_softmax({.device = device, .matrices = matrices, .blocks = blocks, .lse = lse, .run = {}});
      pv_sparse({.device = device,
                 .weights = matrices,
                 .v = p.v,
                 .blocks = blocks,
                 .key_lengths = p.mask.key_lengths,
                 .out = out,
                 .run = {}});
      r.weights.resize(r.scores.size());
      nonzeros.download(r.weights.data());
      metadata.download(r.metadata.data());
    }
    dout.download(r.out.data());
    dlse.download(r.lse.data());
    return r;
  }

  // What a result kept, by key: from the metadata, without masked (-inf) scores.
  cpu::Selection selection(const PipelineResult& r) const {
    const SparseShape s = shape();
    cpu::Selection kept(c.batch * c.heads * c.n_q, c.n_k, 0);
    const std::int64_t rows = s.rows(), places = s.places();
    const std::int64_t per_block = 32 / static_cast<std::int64_t>(size_bytes(c.dtype)), per_code = per_block / 4;
    const int block = s.block > 0 ? s.block : 128;
    for (std::int64_t matrix = 0; matrix < s.matrices(); ++matrix) {
      for (std::int64_t row = 0; row < c.n_q; ++row) {
        for (std::int64_t nonzero = 0; nonzero < places / 2; ++nonzero) {
          const std::int64_t place = nonzero * 2 / per_code * per_code;
          const std::int64_t slot = place / block;
          if (s.block > 0 && slot >= mask.counts[static_cast<std::size_t>(row / block)]) continue;
          if (std::isinf(
                  core::load_element(r.scores.data(), c.dtype, (matrix * rows + row) * (places / 2) + nonzero))) {
            continue;
          }
          const std::uint32_t word = r.metadata[static_cast<std::size_t>(
              matrix * rows * (places / per_block) + core::block_offset({row, place / per_block}, rows))];
          const std::uint32_t code = core::code_in_block(word, static_cast<int>(place % per_block / per_code));
          const int index = nonzero * 2 % per_code == 0 ? core::lower_slot(code) : core::upper_slot(code);
          const std::int64_t in_block = place % block + (per_code == 4 ? index : index / 2);
          const std::int64_t key_block =
              s.block > 0 ? mask.columns[static_cast<std::size_t>(row / block * mask.width + slot)] : slot;
          const std::int64_t key =
              key_block * block + key_at_place(in_block / c.pattern.group, static_cast<int>(in_block % c.pattern.group),
                                               c.pattern.group, c.grouping);
          if (key < c.n_k) kept.at(matrix * c.n_q + row, key) = 1;
        }
      }
    }
    return kept;
  }

  PipelineCase c;
  std::vector<std::byte> q, k, v;
  std::vector<float> bias;
  std::vector<std::uint8_t> allowed;
  BlockMask mask;
};

// The result against the oracle: on integers the selection exactly, then output and LSE given the result's selection.
// Scores and weights are stored in the problem's type: each errs by half a unit in the last place, a score's error
// scaled by its size; twice that is allowed. fp32 on a GPU multiplies in tf32.
inline std::vector<std::string> oracle_failures(const PipelineProblem& problem, const PipelineResult& result,
                                                bool tf32 = false) {
  std::vector<std::string> failures;
  const PipelineCase& c = problem.c;
  const Problem oracle = problem.oracle_problem();
  const cpu::Reference expected = cpu::reference_forward(oracle);
  cpu::Selection kept = expected.selection;
  if (!result.metadata.empty()) {
    kept = problem.selection(result);
    if (c.integers && kept.values != expected.selection.values) failures.push_back("selection differs");
  }
  // The contract's selection has its result already.
  const bool same = kept.values == expected.selection.values;
  const cpu::Reference given = same ? expected : cpu::reference_forward(oracle, &kept);
  double largest_score = 0, largest_value = 0;
  for (const double score : given.scores.values) {
    if (std::isfinite(score)) largest_score = std::max(largest_score, std::abs(score));
  }
  for (std::int64_t i = 0; i < c.batch * c.kv_heads * c.n_k * c.d_v; ++i) {
    largest_value = std::max(largest_value, std::abs(core::load_element(problem.v.data(), c.dtype, i)));
  }
  const double unit = c.dtype == DType::f32 ? (tf32 ? 0x1p-10 : 0x1p-21) : core::epsilon_of(c.dtype);
  const double lse_allowed = unit * (1 + largest_score);
  const double out_allowed = 2 * unit * (1 + largest_score) * largest_value;
  for (std::size_t i = 0; i < given.lse.size(); ++i) {
    const double got = static_cast<double>(result.lse[i]);
    const bool equal = std::isinf(given.lse[i]) ? got == given.lse[i] : std::abs(got - given.lse[i]) <= lse_allowed;
    if (!equal) {
      failures.push_back("lse[" + std::to_string(i) + "] = " + std::to_string(got) + ", expected " +
                         std::to_string(given.lse[i]));
      break;
    }
  }
  for (std::size_t i = 0; i < given.out.size(); ++i) {
    const double got = core::load_element(result.out.data(), c.dtype, static_cast<std::int64_t>(i));
    if (!(std::abs(got - given.out[i]) <= out_allowed)) {
      failures.push_back("out[" + std::to_string(i) + "] = " + std::to_string(got) + ", expected " +
                         std::to_string(given.out[i]) + " within " + std::to_string(out_allowed));
      break;
    }
  }
  return failures;
}

// Shapes and masks that every implementation is run on: lengths that divide nothing, both groupings, every type and
// pattern, head dims that do not fill a vector, grouped heads, causal masks, key lengths, bias, block masks.
inline std::vector<PipelineCase> pipeline_cases() {
  std::vector<PipelineCase> cases;
  std::uint32_t seed = 1;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}}) {
      if (dtype == DType::f32 && pattern.group == 4) continue;
      for (const Grouping grouping : {Grouping::consecutive, Grouping::interleaved}) {
        PipelineCase base{.dtype = dtype, .pattern = pattern, .grouping = grouping};
        const auto add = [&](auto change) {
          PipelineCase next = base;
          change(next);
          next.seed = seed++;
          cases.push_back(next);
        };
        add([](PipelineCase& c) { c.n_q = 130, c.n_k = 203, c.heads = 2; });
        add([](PipelineCase& c) { c.n_q = 1, c.n_k = 1, c.d = 5, c.d_v = 3; });
        add([](PipelineCase& c) { c.n_q = 33, c.n_k = 97, c.d = 80, c.d_v = 72, c.causal = true, c.batch = 2; });
        add([](PipelineCase& c) { c.n_q = 70, c.n_k = 45, c.causal = true, c.d = 33, c.d_v = 130; });
        add([](PipelineCase& c) { c.n_q = 64, c.n_k = 256, c.d = 160, c.d_v = 256, c.heads = 4, c.kv_heads = 2; });
        add([](PipelineCase& c) { c.batch = 3, c.n_q = 50, c.n_k = 150, c.key_lengths = {150, 0, 61}; });
        add([](PipelineCase& c) { c.n_q = 40, c.n_k = 72, c.heads = 2, c.bias = true; });
        add([](PipelineCase& c) { c.n_q = 96, c.n_k = 200, c.integers = false, c.d = 64; });
        add([](PipelineCase& c) {
          c.n_q = 300, c.n_k = 260, c.block = 128, c.heads = 2, c.blocks = {{0, 2}, {}, {1}};
        });
        add([](PipelineCase& c) {
          c.n_q = 140, c.n_k = 400, c.block = 128, c.causal = true, c.d_v = 96, c.blocks = {{0, 1, 2, 3}, {3}};
        });
        if (grouping == Grouping::consecutive) {
          add([](PipelineCase& c) {
            c.n_q = 200, c.n_k = 170, c.block = 64, c.heads = 2, c.blocks = {{1}, {0, 2}, {0, 1, 2}, {2}};
          });
        }
      }
    }
  }
  return cases;
}

inline std::string describe(const PipelineCase& c) {
  return std::string(name(c.dtype)) + " " + to_string(c.pattern) + " " + to_string(c.grouping) + " n_q " +
         std::to_string(c.n_q) + " n_k " + std::to_string(c.n_k) + " d " + std::to_string(c.d) + " d_v " +
         std::to_string(c.d_v) + (c.causal ? " causal" : "") + (c.bias ? " bias" : "") +
         (c.blocks.empty() ? "" : " blocks of " + std::to_string(c.block));
}

}  // namespace dspattn::test
