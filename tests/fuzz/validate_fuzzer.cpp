// Validation of problems made of arbitrary bytes: it never crashes, never reads outside the lengths it is given, gives
// the same reasons twice, and every reason says something.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "core/validate.h"

namespace {

using namespace dspattn;

// Values where arithmetic on sizes goes wrong, and ordinary ones.
constexpr std::array<std::int64_t, 16> kSizes = {0,
                                                 1,
                                                 2,
                                                 3,
                                                 4,
                                                 7,
                                                 16,
                                                 64,
                                                 128,
                                                 256,
                                                 257,
                                                 -1,
                                                 std::int64_t{1} << 31,
                                                 std::int64_t{1} << 40,
                                                 std::numeric_limits<std::int64_t>::max(),
                                                 std::numeric_limits<std::int64_t>::min()};

std::int64_t any_size(FuzzedDataProvider& data) {
  return data.ConsumeBool() ? data.PickValueInArray(kSizes) : data.ConsumeIntegralInRange<std::int64_t>(0, 300);
}

// True for one drawn value in `of`, and never once the input is used up: what remains of a problem is then in order.
bool once_in(FuzzedDataProvider& data, int of) { return data.ConsumeIntegralInRange<int>(1, of) == of && of > 1; }

using Extents = std::array<std::int64_t, kMaxRank>;

// A tensor whose memory validation has no business to read: of the shape given or near it, in memory of its own or, so
// that overlaps occur, of another one. Most problems must pass the first checks, or the later ones are never reached.
template <typename View>
View any_tensor(FuzzedDataProvider& data, int usual_rank, const Extents& usual_shape, unsigned place) {
  View view;
  if (once_in(data, 16)) place = 0;
  std::uintptr_t address = (std::uintptr_t{1} << 44 | std::uintptr_t{place} << 36) +
                           data.ConsumeIntegralInRange<std::uintptr_t>(0, 1 << 14) * 4;
  if (once_in(data, 16)) address += 1;  // aligned for no type but bool
  view.data = once_in(data, 16) ? nullptr : reinterpret_cast<void*>(address);
  view.dtype = static_cast<DType>(once_in(data, 16) ? data.ConsumeIntegralInRange<int>(0, 4) : 0);
  view.rank = once_in(data, 16) ? data.ConsumeIntegralInRange<int>(0, kMaxRank) : usual_rank;
  std::int64_t contiguous = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    const auto dim = static_cast<std::size_t>(i);
    view.shape[dim] = once_in(data, 16) ? any_size(data) : usual_shape[dim];
    view.stride[dim] = once_in(data, 8) ? any_size(data) : contiguous;
    if (__builtin_mul_overflow(contiguous, view.shape[dim], &contiguous)) contiguous = 1;
  }
  return view;
}

// A vector of lengths that may be read: its extents and strides stay inside the memory given.
ConstTensorView any_lengths(FuzzedDataProvider& data, std::vector<std::int32_t>& memory, std::int64_t usual_extent,
                            bool cumulative) {
  memory.assign(64, 0);
  for (std::size_t i = cumulative ? 1 : 0; i < memory.size(); ++i) {
    memory[i] = once_in(data, 64) ? data.ConsumeIntegral<std::int32_t>()
                                  : (cumulative ? memory[i - 1] : 0) / 2 + data.ConsumeIntegralInRange(0, 3);
    if (cumulative && !once_in(data, 64)) memory[i] = std::max(memory[i], memory[i - 1]);
  }
  const bool usual = usual_extent >= 0 && usual_extent <= 32 && !once_in(data, 16);
  ConstTensorView view(memory.data(), DType::i32,
                       {usual ? usual_extent : data.ConsumeIntegralInRange<std::int64_t>(0, 32)},
                       {once_in(data, 8) ? data.ConsumeIntegralInRange<std::int64_t>(0, 2) : 1});
  if (once_in(data, 32)) view.dtype = DType::f32;
  return view;
}

Problem any_problem(FuzzedDataProvider& data, std::array<std::vector<std::int32_t>, 3>& memory) {
  Problem problem;
  problem.device = {static_cast<DeviceType>(data.ConsumeIntegralInRange<int>(0, 1)),
                    once_in(data, 16) ? data.ConsumeIntegralInRange<int>(-1, 2) : 0};
  const auto small = [&](std::int64_t most) { return data.ConsumeIntegralInRange<std::int64_t>(1, most); };
  const bool packed = data.ConsumeBool();
  const Extents q_shape{packed ? 1 : small(8), small(4) * 2, small(300), small(kMaxHeadDim)};
  const Extents k_shape{q_shape[0], data.ConsumeBool() ? q_shape[1] : 2, small(300), q_shape[3]};
  const Extents v_shape{k_shape[0], k_shape[1], k_shape[2], small(kMaxHeadDim)};
  problem.q = any_tensor<ConstTensorView>(data, 4, q_shape, 1);
  problem.k = any_tensor<ConstTensorView>(data, 4, k_shape, 2);
  problem.v = any_tensor<ConstTensorView>(data, 4, v_shape, 3);
  problem.pattern = {2, 4};
  if (once_in(data, 4)) problem.pattern = {data.ConsumeIntegralInRange(-1, 40), data.ConsumeIntegralInRange(-1, 40)};
  problem.grouping = data.ConsumeBool() ? Grouping::interleaved : Grouping::consecutive;
  problem.mask.causal = data.ConsumeBool();
  if (once_in(data, 4)) problem.mask.window_left = any_size(data);
  if (once_in(data, 4)) problem.mask.window_right = any_size(data);
  std::int64_t batch = q_shape[0];
  if (packed) {
    batch = data.ConsumeIntegralInRange<std::int64_t>(0, 8);
    problem.packed =
        Packed{any_lengths(data, memory[1], batch + 1, true), any_lengths(data, memory[2], batch + 1, true),
               once_in(data, 8) ? any_size(data) : 300, once_in(data, 8) ? any_size(data) : 300};
  }
  const Extents mask_shape{data.ConsumeBool() ? batch : 1, data.ConsumeBool() ? problem.q.extent(1) : 1,
                           packed ? 300 : q_shape[2], packed ? 300 : k_shape[2]};
  if (data.ConsumeBool()) problem.mask.key_lengths = any_lengths(data, memory[0], batch, false);
  if (data.ConsumeBool()) {
    problem.mask.allowed = any_tensor<ConstTensorView>(data, 4, mask_shape, 4);
    if (!once_in(data, 8)) problem.mask.allowed.dtype = DType::b8;
  }
  if (data.ConsumeBool()) problem.mask.bias = any_tensor<ConstTensorView>(data, 4, mask_shape, 5);
  if (once_in(data, 4)) problem.scale = data.ConsumeFloatingPoint<double>();
  return problem;
}

void check(const std::vector<std::string>& first, const std::vector<std::string>& second) {
  if (first != second) std::abort();
  for (const std::string& reason : first) {
    if (reason.size() < 10) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  FuzzedDataProvider data(bytes, size);
  std::array<std::vector<std::int32_t>, 3> memory;
  ForwardArgs forward;
  forward.problem = any_problem(data, memory);
  const ConstTensorView& q = forward.problem.q;
  const ConstTensorView& k = forward.problem.k;
  const ConstTensorView& v = forward.problem.v;
  const Extents out_shape{q.shape[0], q.shape[1], q.shape[2], v.shape[3]};
  forward.out = any_tensor<TensorView>(data, 4, out_shape, 6);
  if (data.ConsumeBool()) forward.lse = any_tensor<TensorView>(data, 3, out_shape, 7);
  forward.run.threads = once_in(data, 8) ? data.ConsumeIntegralInRange<int>(-2, 4) : 0;
  check(core::problem_reasons(forward.problem), core::problem_reasons(forward.problem));
  check(core::forward_reasons(forward), core::forward_reasons(forward));

  BackwardArgs backward;
  backward.problem = forward.problem;
  backward.out = forward.out;
  backward.lse = forward.lse;
  backward.d_out = any_tensor<ConstTensorView>(data, 4, out_shape, 8);
  backward.d_q = any_tensor<TensorView>(data, 4, q.shape, 9);
  backward.d_k = any_tensor<TensorView>(data, 4, k.shape, 10);
  backward.d_v = any_tensor<TensorView>(data, 4, v.shape, 11);
  check(core::backward_reasons(backward), core::backward_reasons(backward));
  return 0;
}
