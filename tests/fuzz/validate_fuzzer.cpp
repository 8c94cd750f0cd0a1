// Validation of problems made of arbitrary bytes: it never crashes, never reads outside the lengths it is given, gives
// the same reasons twice, and every reason says something.
#include <fuzzer/FuzzedDataProvider.h>

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

// A tensor whose memory validation has no business to read: any shape, any strides.
template <typename View>
View any_tensor(FuzzedDataProvider& data, int usual_rank) {
  View view;
  // Addresses near each other, so that overlaps occur.
  view.data = data.ConsumeProbability<float>() < 0.1F
                  ? nullptr
                  : reinterpret_cast<void*>(std::uintptr_t{1} << 44 | data.ConsumeIntegral<std::uint16_t>());
  view.dtype = static_cast<DType>(data.ConsumeIntegralInRange<int>(0, 4));
  view.rank = data.ConsumeProbability<float>() < 0.1F ? data.ConsumeIntegralInRange<int>(0, kMaxRank) : usual_rank;
  for (int i = 0; i < view.rank; ++i) {
    view.shape[static_cast<std::size_t>(i)] = any_size(data);
    view.stride[static_cast<std::size_t>(i)] = any_size(data);
  }
  return view;
}

// A vector of lengths that may be read: its extents and strides stay inside the memory given.
ConstTensorView any_lengths(FuzzedDataProvider& data, std::vector<std::int32_t>& memory) {
  memory.resize(64);
  for (std::int32_t& value : memory) value = data.ConsumeIntegral<std::int32_t>() >> data.ConsumeIntegralInRange(0, 31);
  ConstTensorView view(memory.data(), DType::i32, {data.ConsumeIntegralInRange<std::int64_t>(0, 32)},
                       {data.ConsumeIntegralInRange<std::int64_t>(0, 2)});
  if (data.ConsumeProbability<float>() < 0.05F) view.dtype = DType::f32;
  return view;
}

Problem any_problem(FuzzedDataProvider& data, std::array<std::vector<std::int32_t>, 3>& memory) {
  Problem problem;
  problem.device = {static_cast<DeviceType>(data.ConsumeIntegralInRange<int>(0, 1)),
                    data.ConsumeIntegralInRange<int>(-1, 2)};
  problem.q = any_tensor<ConstTensorView>(data, 4);
  problem.k = any_tensor<ConstTensorView>(data, 4);
  problem.v = any_tensor<ConstTensorView>(data, 4);
  problem.pattern = {data.ConsumeIntegralInRange<int>(-1, 40), data.ConsumeIntegralInRange<int>(-1, 40)};
  problem.grouping = data.ConsumeBool() ? Grouping::interleaved : Grouping::consecutive;
  problem.mask.causal = data.ConsumeBool();
  if (data.ConsumeBool()) problem.mask.window_left = any_size(data);
  if (data.ConsumeBool()) problem.mask.window_right = any_size(data);
  if (data.ConsumeBool()) problem.mask.key_lengths = any_lengths(data, memory[0]);
  if (data.ConsumeBool()) problem.mask.allowed = any_tensor<ConstTensorView>(data, 4);
  if (data.ConsumeBool()) problem.mask.bias = any_tensor<ConstTensorView>(data, 4);
  if (data.ConsumeBool()) problem.scale = data.ConsumeFloatingPoint<double>();
  if (data.ConsumeBool()) {
    problem.packed = Packed{any_lengths(data, memory[1]), any_lengths(data, memory[2]), any_size(data), any_size(data)};
  }
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
  forward.out = any_tensor<TensorView>(data, 4);
  if (data.ConsumeBool()) forward.lse = any_tensor<TensorView>(data, 3);
  forward.run.threads = data.ConsumeIntegralInRange<int>(-2, 4);
  check(core::problem_reasons(forward.problem), core::problem_reasons(forward.problem));
  check(core::forward_reasons(forward), core::forward_reasons(forward));

  BackwardArgs backward;
  backward.problem = forward.problem;
  backward.out = forward.out;
  backward.lse = forward.lse;
  backward.d_out = any_tensor<ConstTensorView>(data, 4);
  backward.d_q = any_tensor<TensorView>(data, 4);
  backward.d_k = any_tensor<TensorView>(data, 4);
  backward.d_v = any_tensor<TensorView>(data, 4);
  check(core::backward_reasons(backward), core::backward_reasons(backward));
  return 0;
}
