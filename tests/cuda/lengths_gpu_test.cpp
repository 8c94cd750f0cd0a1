// Lengths that only the device knows: tensors of any stride, and of any content. Whatever they hold, a kernel stays
// within the tensors, and gives what it gives for the same lengths brought into range.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check/random.h"
#include "cuda/fused_rows.h"
#include "dspattn/attention.h"

namespace dspattn {
namespace {

constexpr std::int64_t kHeads = 2, kKeys = 290;
constexpr std::size_t kGuard = 4096;  // bytes on either side of a result
constexpr std::uint8_t kPattern = 0xA5;

// An int32 tensor on the device, `stride` elements apart; what lies between is garbage, too.
struct DeviceLengths {
  std::vector<std::int32_t> values;
  std::int64_t stride = 1;
  core::DeviceBuffer buffer;

  DeviceLengths(std::vector<std::int32_t> lengths, std::int64_t apart) : values(std::move(lengths)), stride(apart) {
    const std::size_t last = (values.size() - 1) * static_cast<std::size_t>(stride);
    std::vector<std::int32_t> spread(last + 1, std::numeric_limits<std::int32_t>::min() + 77);
    for (std::size_t i = 0; i < values.size(); ++i) spread[i * static_cast<std::size_t>(stride)] = values[i];
    buffer = core::DeviceBuffer(gpu_memory(), spread.size() * sizeof spread[0]);
    buffer.upload(spread.data());
  }
  ConstTensorView view() const {
    return {buffer.data(), DType::i32, {static_cast<std::int64_t>(values.size())}, {stride}};
  }
};

// A result with guards on both sides.
struct Guarded {
  std::vector<std::uint8_t> host;
  core::DeviceBuffer buffer;

  explicit Guarded(std::size_t bytes) : host(bytes + 2 * kGuard, kPattern), buffer(gpu_memory(), host.size()) {
    buffer.upload(host.data());
  }
  void* data() const { return static_cast<std::uint8_t*>(buffer.data()) + kGuard; }
  // The bytes between the guards, which are whole.
  std::vector<std::uint8_t> download() {
    buffer.download(host.data());
    const auto is_guard = [](std::uint8_t byte) { return byte == kPattern; };
    const auto end = host.end() - static_cast<std::ptrdiff_t>(kGuard);
    EXPECT_TRUE(std::all_of(host.begin(), host.begin() + kGuard, is_guard)) << "written before the result";
    EXPECT_TRUE(std::all_of(end, host.end(), is_guard)) << "written past the result";
    return {host.begin() + kGuard, end};
  }
};

struct Results {
  std::vector<std::uint8_t> out, lse, d_q, d_k, d_v;  // gradients of rows that have them alone
  bool operator==(const Results&) const = default;
};

// One problem of a row: a packed batch, or sequences with key lengths.
struct Problems {
  Row row;
  std::int64_t batch;
  bool packed;
  bool backward = false;  // the row is of a backward; its forward is whichever serves
  std::int64_t rows = 300;
  std::vector<core::DeviceBuffer> inputs;  // q, k, v, d_out

  Problems(const Row& of, std::int64_t sequences, bool is_packed, std::uint64_t seed)
      : row(of), batch(sequences), packed(is_packed) {
    if (row.name.starts_with("decode")) rows = 7;
    check::Random random(seed, 0);
    for (const std::int64_t n : {rows, kKeys, kKeys, rows}) {
      std::vector<std::uint8_t> bytes(static_cast<std::size_t>(copies() * kHeads * n * row.dim) * element());
      // Small numbers of either sign in every type: an exponent in the middle, anything else at random.
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        const bool high = i % element() == element() - 1;
        bytes[i] = static_cast<std::uint8_t>(random.between(0, 255));
        if (high) bytes[i] = static_cast<std::uint8_t>((bytes[i] & 0x80) | 0x3C);
      }
      inputs.emplace_back(gpu_memory(), bytes.size());
      inputs.back().upload(bytes.data());
    }
  }
  std::int64_t copies() const { return packed ? 1 : batch; }
  std::size_t element() const { return size_bytes(row.dtype); }

  // [copies, heads, n, d] in the row's type.
  template <typename View = ConstTensorView, typename Pointer>
  View view(Pointer* data, std::int64_t n) const {
    return {data, row.dtype, {copies(), kHeads, n, row.dim}};
  }

  Problem problem(const DeviceLengths& first, const DeviceLengths& second, bool causal) const {
    Problem problem;
    problem.device = kGpu;
    problem.q = view(inputs[0].data(), rows);
    problem.k = view(inputs[1].data(), kKeys);
    problem.v = view(inputs[2].data(), kKeys);
    problem.pattern = row.pattern;
    problem.mask.causal = causal;
    if (packed) {
      problem.packed = Packed{first.view(), second.view(), rows, kKeys};
    } else {
      problem.mask.key_lengths = first.view();
    }
    return problem;
  }

  Results run(const DeviceLengths& first, const DeviceLengths& second, bool causal) const {
    const auto bytes = [&](std::int64_t n) {
      return static_cast<std::size_t>(copies() * kHeads * n * row.dim) * element();
    };
    Guarded out(bytes(rows)), lse(static_cast<std::size_t>(copies() * kHeads * rows) * sizeof(float));
    ForwardArgs args;
    args.problem = problem(first, second, causal);
    args.out = view<TensorView>(out.data(), rows);
    args.lse = {lse.data(), DType::f32, {copies(), kHeads, rows}};
    if (!backward) args.run.kernel = row.name;
    run_prepared(args);
    if (!backward) return {out.download(), lse.download(), {}, {}, {}};

    Guarded d_q(bytes(rows)), d_k(bytes(kKeys)), d_v(bytes(kKeys));
    BackwardArgs gradients;
    gradients.problem = args.problem;
    gradients.out = args.out;
    gradients.lse = args.lse;
    gradients.d_out = view(inputs[3].data(), rows);
    gradients.d_q = view<TensorView>(d_q.data(), rows);
    gradients.d_k = view<TensorView>(d_k.data(), kKeys);
    gradients.d_v = view<TensorView>(d_v.data(), kKeys);
    gradients.run.kernel = row.name;
    run_prepared(gradients);
    return {out.download(), lse.download(), d_q.download(), d_k.download(), d_v.download()};
  }

  template <typename Args>
  static void run_prepared(const Args& args) {
    Prepared<Args> call(args);
    const core::DeviceBuffer workspace(gpu_memory(), std::max<std::size_t>(call.workspace_bytes(), 1));
    call.run(workspace.data(), workspace.bytes());
  }
};

std::vector<std::int32_t> garbage(check::Random& random, std::int64_t count, std::int64_t most) {
  constexpr std::int32_t kSpecial[] = {std::numeric_limits<std::int32_t>::min(),
                                       std::numeric_limits<std::int32_t>::max(), -1, 0, 1 << 20};
  std::vector<std::int32_t> values;
  for (std::int64_t i = 0; i < count; ++i) {
    values.push_back(random.chance(40) ? kSpecial[random.between(0, 4)]
                                       : static_cast<std::int32_t>(random.between(-50, most + 50)));
  }
  return values;
}

class DeviceLengthsOf : public Robust {
 protected:
  bool has(const char* part) const { return GetParam().find(part) != std::string::npos; }
  bool packs() const { return !has("pipeline") && !has("decode"); }  // takes packed batches
  Row row() const {
    const std::string& name = GetParam();  // a general row has one name for both passes
    return Row(name.ends_with("_gradients") ? name.substr(0, name.rfind('_')) : name);
  }
  Problems problems(std::int64_t batch, bool packed, std::uint64_t seed) const {
    Problems result(row(), batch, packed, seed);
    result.backward = has("backward") || has("gradients");
    return result;
  }
};

int count_of_problems() {
  const char* given = std::getenv("DSPATTN_LENGTH_CASES");
  return given != nullptr ? std::stoi(given) : 8;
}

TEST_P(DeviceLengthsOf, GarbageStaysWithinTheTensors) {
  check::Random random(11, 3);
  int ran = 0, compared = 0;
  for (int i = 0; i < count_of_problems(); ++i) {
    const std::int64_t batch = random.between(1, 5);
    const bool packed = packs() && i % 2 == 0;
    const std::int64_t stride = i % 3 == 0 ? 0 : i % 3;  // expanded, contiguous, a column of two
    const bool causal = random.chance(50);
    const Problems drawn = problems(batch, packed, static_cast<std::uint64_t>(i));
    const DeviceLengths first(garbage(random, batch + (packed ? 1 : 0), packed ? drawn.rows : kKeys), stride);
    const DeviceLengths second(garbage(random, batch + 1, kKeys), 2);
    const Results found = drawn.run(first, second, causal);
    if (packed) {
      ++ran;
      continue;  // sequences may overlap: their common rows are either's
    }
    // An expanded tensor holds its last value everywhere.
    std::vector<std::int32_t> clamped = first.values;
    for (std::int32_t& length : clamped) {
      length = std::clamp<std::int32_t>(stride == 0 ? first.values.back() : length, 0, kKeys);
    }
    EXPECT_TRUE(found == drawn.run(DeviceLengths(clamped, 1), second, causal)) << "problem " << i;
    ++compared;
  }
  EXPECT_EQ(ran > 0, packs());
  EXPECT_GT(compared, 0);
}

// A column of a table, as lens[:, 0] gives, and lengths in reverse order of memory.
TEST_P(DeviceLengthsOf, StridesAreFollowed) {
  if (packs()) {
    const std::vector<std::int32_t> ends{0, 120, 120, 211}, key_ends{0, 90, 222, 280};
    const Problems packed = problems(3, true, 5);
    const Results wanted = packed.run({ends, 1}, {key_ends, 1}, false);
    EXPECT_TRUE(wanted == packed.run({ends, 3}, {key_ends, 2}, false));
  }
  const Problems padded = problems(3, false, 6);
  const DeviceLengths nothing({0}, 1);
  EXPECT_TRUE(padded.run({{200, 0, 131}, 1}, nothing, true) == padded.run({{200, 0, 131}, 5}, nothing, true));
  EXPECT_TRUE(padded.run({{131, 131, 131}, 1}, nothing, true) == padded.run({{131, 131, 131}, 0}, nothing, true));
}

// Lengths that are wrong only in being out of range: the same results as in range, and rows of no sequence are empty.
TEST_P(DeviceLengthsOf, OutOfRangeIsClampedAndTheRestIsEmpty) {
  if (!packs()) GTEST_SKIP() << "takes no packed batches";
  const Problems packed = problems(3, true, 7);
  const std::vector<std::int32_t> keys{0, 90, 222, 280};
  const Results wanted = packed.run({{0, 50, 100, 300}, 1}, {keys, 1}, false);
  EXPECT_TRUE(wanted == packed.run({{-10, 50, 100, 1 << 30}, 1}, {keys, 1}, false));
  const std::vector<std::int32_t> decreasing{0, 120, 100, 100}, empty{0, 120, 120, 120};
  EXPECT_TRUE(packed.run({empty, 1}, {keys, 1}, false) == packed.run({decreasing, 1}, {keys, 1}, false));

  const Results found = packed.run({empty, 1}, {keys, 1}, false);
  for (std::int64_t head = 0; head < kHeads; ++head) {
    for (std::int64_t i = 120; i < packed.rows; ++i) {
      const auto at = static_cast<std::size_t>(head * packed.rows + i);
      float lse = 0;
      std::memcpy(&lse, found.lse.data() + at * sizeof lse, sizeof lse);
      ASSERT_EQ(lse, -std::numeric_limits<float>::infinity()) << "row " << i;
      const std::size_t bytes = static_cast<std::size_t>(row().dim) * packed.element();
      const auto begin = found.out.begin() + static_cast<std::ptrdiff_t>(at * bytes);
      ASSERT_TRUE(std::all_of(begin, begin + static_cast<std::ptrdiff_t>(bytes), [](std::uint8_t x) { return x == 0; }))
          << "row " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, DeviceLengthsOf,
                         ::testing::Values("sm90_fused_2_4_bf16_d64", "sm90_fused_1_2_fp16_d128",
                                           "sm90_fused_2_4_fp16_d192", "sm90_fused_1_2_fp32_d64", "sm90_pipeline",
                                           "sm80_pipeline", "decode_bf16_d64", "decode_fp32_d128", "general_bf16",
                                           "general_fp32", "sm90_fused_backward_2_4_bf16_d64",
                                           "sm90_fused_backward_1_2_fp16_d128", "general_bf16_gradients",
                                           "general_fp32_gradients"),
                         [](const auto& row) { return row.param; });

}  // namespace
}  // namespace dspattn
