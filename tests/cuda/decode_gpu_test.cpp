// The split-key rows on a GPU: random problems of few queries against the oracle and beside the CPU kernel, reruns,
// splits of every number, graphs whose lengths grow, lengths of any content, mask tensors, rows without keys. Skipped
// without a GPU of sm_80 or later.
//   DSPATTN_DECODE_CASES   random problems per row (default 40; below 20 only short ones)
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "check/check.h"
#include "check/random.h"
#include "core/half.h"
#include "cuda/decode/rows.h"
#include "cuda/decode_problems.h"
#include "cuda/device/device.h"
#include "cuda/random_problems.h"

namespace dspattn {
namespace {

std::int64_t count_of_problems() { return from_environment("DSPATTN_DECODE_CASES", 40); }

// A row of the table by its name: decode_bf16_d64.
struct Row {
  std::string name;
  DType dtype;
  std::int64_t dim;

  explicit Row(const std::string& of) : name(of) {
    const auto has = [&](const char* part) { return of.find(part) != std::string::npos; };
    dtype = has("_fp32_") ? DType::f32 : has("_bf16_") ? DType::bf16 : DType::f16;
    dim = std::stoi(of.substr(of.rfind('d') + 1));
  }
};

class DecodeRow : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string why = no_ampere(); !why.empty()) GTEST_SKIP() << why;
  }
  Row row() const { return Row(GetParam()); }

  void expect_right(const check::Case& drawn) const { dspattn::expect_right(drawn, GetParam()); }
  check::Case problem(std::int64_t heads, std::int64_t kv_heads, std::int64_t n_q, std::int64_t n_k) const {
    return few_queries(row().dtype, row().dim, heads, kv_heads, n_q, n_k);
  }
};

TEST_P(DecodeRow, AgreesWithTheOracleOnRandomProblems) {
  const std::int64_t wanted = count_of_problems();
  std::int64_t served = 0, beside_cpu = 0;
  double worst = 0;
  for (std::int64_t index = 0; served < wanted && index < 20 * wanted; ++index) {
    check::CheckOptions options;
    options.device = kGpu;
    options.beside_cpu = true;
    options.limits.pass = Pass::forward;
    options.limits.dtype = row().dtype;
    options.limits.pattern = index % 2 == 0 ? Pattern{2, 4} : Pattern{1, 2};
    if (index % 3 != 0) options.limits.head_dim = row().dim;
    // One query, a few, and as many as there may be.
    options.limits.max_queries = index % 4 == 0 ? 1 : index % 4 == 1 ? 64 : 16;
    options.limits.max_n = wanted < 20 ? 300 : 3000;
    options.limits.max_work = wanted < 20 ? 1'000'000 : 20'000'000;
    if (check::draw_case(9, index, options.limits).packed) continue;
    const check::CaseReport report = check::check_case(9, index, GetParam(), options);
    if (!report.served) continue;
    ++served;
    beside_cpu += report.rows_beside_cpu;
    worst = std::max(worst, report.worst);
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << report.description << "\n" << failure << "\n" << report.command;
    }
  }
  std::cout << GetParam() << ": " << served << " problems, largest error " << worst << " of what is allowed\n";
  EXPECT_EQ(served, wanted);
  EXPECT_GT(beside_cpu, 0);
}

// As many rows of a key head as a warp, two and four have, and one more.
TEST_P(DecodeRow, EveryNumberOfRows) {
  for (const std::int64_t n_q : {1, 2, 3, 5, 8, 11, 16, 21, 40}) {
    check::Case drawn = problem(3, 1, n_q, 333);
    drawn.causal = true;
    drawn.window_left = n_q % 2 == 0 ? std::optional<std::int64_t>(200) : std::nullopt;
    expect_right(drawn);
  }
  // Tiles of a head's rows, which see other keys.
  check::Case tiles = problem(2, 2, 150, 333);
  tiles.causal = true;
  tiles.window_left = 100;
  expect_right(tiles);
}

TEST_P(DecodeRow, EveryLengthOfKeys) {
  for (const std::int64_t n_k : {0, 1, 4, 31, 32, 33, 127, 128, 129, 512, 1000}) {
    expect_right(problem(1, 1, 1, n_k));
    expect_right(problem(2, 1, 1, n_k));
  }
}

// Inputs on the device, without an oracle: for comparisons of bits.
struct Inputs {
  std::int64_t batch, heads, kv_heads, n_q, n_k, dim;
  DType dtype;
  std::vector<core::DeviceBuffer> buffers;

  Inputs(const Row& row, std::int64_t b, std::int64_t h, std::int64_t kv, std::int64_t q_rows, std::int64_t keys)
      : batch(b), heads(h), kv_heads(kv), n_q(q_rows), n_k(keys), dim(row.dim), dtype(row.dtype) {
    check::Random random(3, 1);
    for (const std::int64_t rows : {heads * n_q, kv_heads * n_k, kv_heads * n_k}) {
      const std::size_t element = size_bytes(dtype);
      std::vector<std::uint8_t> bytes(static_cast<std::size_t>(batch * rows * dim) * element);
      // Small numbers of either sign in every type: an exponent in the middle, anything else at random.
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<std::uint8_t>(random.between(0, 255));
        if (i % element == element - 1) bytes[i] = static_cast<std::uint8_t>((bytes[i] & 0x80) | 0x3C);
      }
      buffers.emplace_back(gpu_memory(), bytes.size());
      buffers.back().upload(bytes.data());
    }
  }
  ForwardArgs args(const std::string& kernel) const {
    ForwardArgs a;
    a.problem.device = kGpu;
    a.problem.q = {buffers[0].data(), dtype, {batch, heads, n_q, dim}};
    a.problem.k = {buffers[1].data(), dtype, {batch, kv_heads, n_k, dim}};
    a.problem.v = {buffers[2].data(), dtype, {batch, kv_heads, n_k, dim}};
    a.run.kernel = kernel;
    return a;
  }
};

// fp32 results with guards around them, and their log-sum-exps.
struct Outputs {
  static constexpr std::size_t kGuard = 1024;
  static constexpr std::uint8_t kPattern = 0xA5;
  std::size_t out_bytes, lse_bytes;
  core::DeviceBuffer out, lse;

  explicit Outputs(const Inputs& in)
      : out_bytes(static_cast<std::size_t>(in.batch * in.heads * in.n_q * in.dim) * 4),
        lse_bytes(static_cast<std::size_t>(in.batch * in.heads * in.n_q) * 4),
        out(gpu_memory(), out_bytes + 2 * kGuard),
        lse(gpu_memory(), lse_bytes + 2 * kGuard) {
    clear();
  }
  void clear() {
    const std::vector<std::uint8_t> pattern(std::max(out.bytes(), lse.bytes()), kPattern);
    out.upload(pattern.data());
    lse.upload(pattern.data());
  }
  void attach(ForwardArgs& args) const {
    const Problem& p = args.problem;
    const std::int64_t b = p.q.extent(0), h = p.q.extent(1), n = p.q.extent(2);
    args.out = {static_cast<std::uint8_t*>(out.data()) + kGuard, DType::f32, {b, h, n, p.v.extent(3)}};
    args.lse = {static_cast<std::uint8_t*>(lse.data()) + kGuard, DType::f32, {b, h, n}};
  }
  // Results and log-sum-exps; what lies around them is whole.
  std::vector<float> download() const {
    std::vector<float> values;
    for (const core::DeviceBuffer* buffer : {&out, &lse}) {
      std::vector<std::uint8_t> bytes(buffer->bytes());
      buffer->download(bytes.data());
      const auto is_guard = [](std::uint8_t byte) { return byte == kPattern; };
      EXPECT_TRUE(std::all_of(bytes.begin(), bytes.begin() + kGuard, is_guard)) << "written before the result";
      EXPECT_TRUE(std::all_of(bytes.end() - kGuard, bytes.end(), is_guard)) << "written past the result";
      const std::size_t count = (bytes.size() - 2 * kGuard) / 4;
      values.resize(values.size() + count);
      std::memcpy(values.data() + values.size() - count, bytes.data() + kGuard, 4 * count);
    }
    return values;
  }
};

std::vector<float> run(const ForwardArgs& given, const Inputs& in) {
  ForwardArgs args = given;
  const Outputs outputs(in);
  outputs.attach(args);
  Prepared call(args);
  const core::DeviceBuffer workspace(gpu_memory(), std::max<std::size_t>(call.workspace_bytes(), 1));
  call.run(workspace.data(), workspace.bytes());
  return outputs.download();
}

// The same bits: of floats, so that NaN equals itself.
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

core::DeviceBuffer on_device(const std::vector<std::int32_t>& values) {
  core::DeviceBuffer buffer(gpu_memory(), 4 * values.size());
  buffer.upload(values.data());
  return buffer;
}

TEST_P(DecodeRow, GivesTheSameBitsOverReruns) {
  const Inputs in(row(), 2, 4, 2, 2, 1500);
  const ForwardArgs args = in.args(GetParam());
  const std::vector<float> first = run(args, in);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(first, run(args, in)));
}

// Garbage is what it is when brought into range; what lies past a length reaches no result.
TEST_P(DecodeRow, LengthsOfAnyContent) {
  const Inputs in(row(), 4, 2, 2, 1, 500);
  ForwardArgs args = in.args(GetParam());
  const core::DeviceBuffer wild = on_device({std::numeric_limits<std::int32_t>::min(), 1 << 30, 200, -7});
  const core::DeviceBuffer tame = on_device({0, 500, 200, 0});
  args.problem.mask.key_lengths = {wild.data(), DType::i32, {4}};
  const std::vector<float> found = run(args, in);
  args.problem.mask.key_lengths = {tame.data(), DType::i32, {4}};
  EXPECT_TRUE(same_bits(found, run(args, in)));
  for (std::size_t i = 0; i < static_cast<std::size_t>(2 * row().dim); ++i)
    ASSERT_EQ(found[i], 0) << "a row without keys";
  const std::size_t lse = static_cast<std::size_t>(4 * 2 * row().dim);
  EXPECT_EQ(found[lse], -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isfinite(found[lse + 2]));
}

// A static cache: what lies past the length is NaN, and the length grows between replays of one graph.
TEST_P(DecodeRow, AGraphSeesLengthsGrow) {
  Inputs in(row(), 1, 2, 2, 1, 700);
  const std::size_t element = size_bytes(row().dtype);
  const std::size_t row_bytes = static_cast<std::size_t>(row().dim) * element;
  std::vector<std::uint8_t> caches[2];
  for (int i = 0; i < 2; ++i) {
    caches[i].resize(in.buffers[static_cast<std::size_t>(1 + i)].bytes());
    in.buffers[static_cast<std::size_t>(1 + i)].download(caches[i].data());
  }
  core::DeviceBuffer lengths = on_device({1});
  ForwardArgs args = in.args(GetParam());
  args.problem.mask.key_lengths = {lengths.data(), DType::i32, {1}};
  Outputs outputs(in);
  outputs.attach(args);
  Prepared call(args);
  const core::DeviceBuffer workspace(gpu_memory(), std::max<std::size_t>(call.workspace_bytes(), 1));

  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  args.run.stream = stream;
  Prepared captured(args);
  captured.run(workspace.data(), workspace.bytes());
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (const std::int32_t length : {1, 2, 63, 64, 65, 300, 700}) {
    lengths.upload(&length);
    for (std::size_t i = 0; i < 2; ++i) {
      std::vector<std::uint8_t> bytes = caches[i];
      for (std::size_t head = 0; head < 2; ++head) {
        const std::size_t begin = (head * 700 + static_cast<std::size_t>(length)) * row_bytes;
        std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                  bytes.begin() + static_cast<std::ptrdiff_t>((head + 1) * 700 * row_bytes), std::uint8_t{0xFF});
      }
      in.buffers[1 + i].upload(bytes.data());
    }
    outputs.clear();
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const std::vector<float> found = outputs.download();
    for (const float x : found) ASSERT_TRUE(std::isfinite(x)) << "length " << length;
    // The same keys without a length.
    ForwardArgs plain = in.args(GetParam());
    plain.problem.k.shape[2] = plain.problem.v.shape[2] = length;
    const std::vector<float> wanted = run(plain, in);
    ASSERT_EQ(found.size(), wanted.size());
    for (std::size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], wanted[i], 1e-2 * (1 + std::abs(wanted[i])));
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_P(DecodeRow, NonFiniteValuesOfPrunedKeysReachNoRow) {
  // Key 0 is the only one of its group of four that loses to nobody; keys 1 to 3 hold infinities.
  Inputs in(row(), 1, 1, 1, 1, 64);
  const std::size_t element = size_bytes(row().dtype);
  const auto one = [&](std::uint8_t* to, bool infinite) {
    // 1, or infinity: the high bytes of each type.
    const std::uint8_t high = row().dtype == DType::f16 ? (infinite ? 0x7C : 0x3C) : (infinite ? 0x7F : 0x3F);
    std::memset(to, 0, element);
    to[element - 1] = high;
    if (row().dtype != DType::f16) to[element - 2] = 0x80;
  };
  std::vector<std::uint8_t> q(in.buffers[0].bytes()), k(in.buffers[1].bytes(), 0), v(in.buffers[2].bytes());
  const auto dim = static_cast<std::size_t>(row().dim);
  for (std::size_t i = 0; i < dim; ++i) one(q.data() + i * element, false);
  for (std::size_t key = 0; key < 64; ++key) {
    const bool kept = key % 4 < 2;
    for (std::size_t i = 0; i < dim; ++i) {
      if (kept) one(k.data() + (key * dim + i) * element, false);
      one(v.data() + (key * dim + i) * element, !kept);
    }
  }
  in.buffers[0].upload(q.data());
  in.buffers[1].upload(k.data());
  in.buffers[2].upload(v.data());
  for (const std::int64_t heads : {1, 2}) {  // gathered rows, and all
    ForwardArgs args = in.args(GetParam());
    args.problem.grouping = Grouping::consecutive;
    args.problem.q.shape[1] = heads;
    args.problem.q.stride[1] = 0;
    Inputs shape(row(), 1, heads, 1, 1, 1);
    for (const float x : run(args, shape)) ASSERT_TRUE(std::isfinite(x)) << heads << " heads";
  }
}

// Pages in any order give the bits that one piece gives; what is no page is as past the length.
TEST_P(DecodeRow, PagesInAnyOrder) {
  // Kept rows alone, and all; a tile's keys of a kind in one page, and in several.
  for (const auto& [heads, grouping] : {std::pair{2, Grouping::interleaved}, std::pair{4, Grouping::interleaved},
                                        std::pair{2, Grouping::consecutive}, std::pair{4, Grouping::consecutive}}) {
    constexpr std::int64_t kPage = 48, kBlocks = 9;
    Inputs in(row(), 2, heads, 2, 1, kPage * kBlocks);
    const core::DeviceBuffer lengths = on_device({430, 217});
    ForwardArgs args = in.args(GetParam());
    args.problem.grouping = grouping;
    args.problem.mask.key_lengths = {lengths.data(), DType::i32, {2}};
    const std::vector<float> wanted = run(args, in);

    // Page (b, i) goes to place 5 (9 b + i) modulo 19; the others hold NaN.
    constexpr std::int64_t kPlaces = 19;
    const std::size_t page_bytes = static_cast<std::size_t>(kPage * row().dim) * size_bytes(row().dtype);
    std::vector<std::int32_t> table;
    for (std::int64_t i = 0; i < 2 * kBlocks; ++i) table.push_back(static_cast<std::int32_t>(5 * i % kPlaces));
    std::vector<core::DeviceBuffer> pages;
    for (std::size_t tensor = 1; tensor <= 2; ++tensor) {
      std::vector<std::uint8_t> piece(in.buffers[tensor].bytes());
      in.buffers[tensor].download(piece.data());
      std::vector<std::uint8_t> cut(static_cast<std::size_t>(kPlaces) * 2 * page_bytes, 0xFF);
      for (std::size_t b = 0; b < 2; ++b) {
        for (std::size_t head = 0; head < 2; ++head) {
          for (std::size_t i = 0; i < kBlocks; ++i) {
            const auto place = static_cast<std::size_t>(table[b * kBlocks + i]);
            std::memcpy(cut.data() + (place * 2 + head) * page_bytes,
                        piece.data() + ((b * 2 + head) * kBlocks + i) * page_bytes, page_bytes);
          }
        }
      }
      pages.emplace_back(gpu_memory(), cut.size());
      pages.back().upload(cut.data());
    }
    table[8] = -1;  // the keys from 384 on, as if the length were that
    table[2 * kBlocks - 1] = std::numeric_limits<std::int32_t>::max();  // past the length anyway
    const core::DeviceBuffer places = on_device(table);
    args.problem.k = {pages[0].data(), row().dtype, {kPlaces, 2, kPage, row().dim}};
    args.problem.v = {pages[1].data(), row().dtype, {kPlaces, 2, kPage, row().dim}};
    args.problem.block_table = {places.data(), DType::i32, {2, kBlocks}};
    const std::vector<float> found = run(args, in);
    const core::DeviceBuffer shorter = on_device({384, 217});
    ForwardArgs plain = in.args(GetParam());
    plain.problem.grouping = grouping;
    plain.problem.mask.key_lengths = {shorter.data(), DType::i32, {2}};
    const std::vector<float> cut_short = run(plain, in);
    const std::size_t half = static_cast<std::size_t>(heads * row().dim);  // of the first sequence
    for (std::size_t i = 0; i < half; ++i) ASSERT_NEAR(found[i], cut_short[i], 1e-2 * (1 + std::abs(cut_short[i])));
    EXPECT_EQ(std::memcmp(found.data() + half, wanted.data() + half, 4 * half), 0) << "the second sequence";
  }
}

// Heads that choose together, beside a plain computation of the contract's words: the keys of the largest sums of the
// heads' softmax stay.
TEST_P(DecodeRow, HeadsChooseTogether) {
  if (row().dtype == DType::f32 || row().dim > 128) GTEST_SKIP() << "not compiled";
  struct Shape {
    std::int64_t heads, n_q, n_k;
  };
  // Scores that stay in shared memory, of half a tile's rows and of all; of several queries; so many that a few
  // multiprocessors have no room.
  for (const auto& [heads, n_q, n_k] :
       {Shape{4, 1, 500}, Shape{7, 1, 500}, Shape{4, 3, 500}, Shape{3, 2, 300}, Shape{16, 1, 22000}}) {
    if (n_k > 500 && row().dim > 64) continue;
    for (const Pattern pattern : {Pattern{2, 4}, Pattern{1, 2}}) {
      if (n_k > 500 && pattern.group == 2) continue;
      const Inputs in(row(), 1, heads, 1, n_q, n_k);
      ForwardArgs args = in.args(GetParam());
      args.problem.pattern = pattern;
      args.problem.choice = Choice::shared;
      args.problem.mask.causal = true;
      args.problem.scale = 0.05;
      const std::vector<float> found = run(args, in);
      std::vector<std::vector<double>> tensors;
      for (const core::DeviceBuffer& buffer : in.buffers) {
        std::vector<std::uint16_t> bits(buffer.bytes() / 2);
        buffer.download(bits.data());
        tensors.emplace_back();
        for (const std::uint16_t x : bits) {
          tensors.back().push_back(row().dtype == DType::bf16 ? core::decode_bf16(x) : core::decode_f16(x));
        }
      }
      const auto dim = static_cast<std::size_t>(row().dim);
      for (std::int64_t i = 0; i < n_q; ++i) {
        const auto keys = static_cast<std::size_t>(n_k - n_q + i + 1);  // that the query sees
        std::vector<std::vector<double>> scores(static_cast<std::size_t>(heads), std::vector<double>(keys));
        std::vector<double> shares(keys, 0.0);
        for (std::size_t h = 0; h < static_cast<std::size_t>(heads); ++h) {
          double sum = 0;
          for (std::size_t j = 0; j < keys; ++j) {
            const double* q =
                tensors[0].data() + (h * static_cast<std::size_t>(n_q) + static_cast<std::size_t>(i)) * dim;
            for (std::size_t c = 0; c < dim; ++c) scores[h][j] += 0.05 * q[c] * tensors[1][j * dim + c];
            sum += std::exp(scores[h][j]);
          }
          for (std::size_t j = 0; j < keys; ++j) shares[j] += std::exp(scores[h][j]) / sum;
        }
        std::vector<bool> kept(keys);
        for (std::size_t j = 0; j < keys; ++j) {
          const KeyPlace own = place_of_key(static_cast<std::int64_t>(j), pattern.group, Grouping::interleaved);
          int better = 0;
          for (int e = 0; e < pattern.group; ++e) {
            const auto rival =
                static_cast<std::size_t>(key_at_place(own.group, e, pattern.group, Grouping::interleaved));
            if (rival < keys && (shares[rival] > shares[j] || (shares[rival] == shares[j] && rival < j))) ++better;
          }
          kept[j] = better < pattern.keep;
        }
        for (std::size_t h = 0; h < static_cast<std::size_t>(heads); ++h) {
          double sum = 0, first = 0;
          for (std::size_t j = 0; j < keys; ++j) {
            if (!kept[j]) continue;
            sum += std::exp(scores[h][j]);
            first += std::exp(scores[h][j]) * tensors[2][j * dim];
          }
          const std::size_t at = h * static_cast<std::size_t>(n_q) + static_cast<std::size_t>(i);
          EXPECT_NEAR(found[static_cast<std::size_t>(heads * n_q) * dim + at], std::log(sum), 2e-3);
          EXPECT_NEAR(found[at * dim], first / sum, 5e-3) << "head " << h;
        }
      }
    }
  }
}

// A head whose best key the others choose away, and whose weights of what is left are next to nothing beside it: they
// are still the weights of what is kept.
TEST_P(DecodeRow, WhatOthersChooseAway) {
  if (row().dtype == DType::f32 || row().dim > 128) GTEST_SKIP() << "not compiled";
  constexpr std::int64_t kHeads = 3, kKeys = 128;
  Inputs in(row(), 1, kHeads, 1, 1, kKeys);
  const auto dim = static_cast<std::size_t>(row().dim);
  const std::uint16_t one = row().dtype == DType::bf16 ? core::encode_bf16(1.0) : core::encode_f16(1.0);
  const std::uint16_t many = row().dtype == DType::bf16 ? core::encode_bf16(256.0) : core::encode_f16(256.0);
  std::vector<std::uint16_t> q(kHeads * dim), k(kKeys * dim), v(kKeys * dim);
  // Keys 0, 32, 64 and 96 are a group; of three of them each is one head's best by far.
  constexpr std::size_t kBest[kHeads] = {96, 0, 32};
  for (std::size_t head = 0; head < kHeads; ++head) {
    q[head * dim + head] = many;
    k[kBest[head] * dim + head] = one;
  }
  for (std::size_t key = 0; key < kKeys; ++key) v[key * dim] = key % 64 < 32 ? one : 0;
  in.buffers[0].upload(q.data());
  in.buffers[1].upload(k.data());
  in.buffers[2].upload(v.data());
  ForwardArgs args = in.args(GetParam());
  args.problem.choice = Choice::shared;
  args.problem.scale = 1;
  const std::vector<float> found = run(args, in);
  // Keys r and r + 32 of every group stay, and to head 0 all of them are alike.
  EXPECT_NEAR(found[0], 0.5, 1e-3);
  EXPECT_NEAR(found[kHeads * dim], std::log(64.0), 1e-3);
  EXPECT_NEAR(found[dim], 1.0, 1e-3);
  EXPECT_NEAR(found[2 * dim], 0.0, 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Table, DecodeRow, ::testing::ValuesIn(names_of(cuda::decode::decode_rows())),
                         name_of<std::string>);

}  // namespace
}  // namespace dspattn
