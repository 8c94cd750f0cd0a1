// The library's forward for benchmarks in Python: one C function over plain numbers, called through ctypes.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>

#include "dspattn/attention.h"

namespace {

using namespace dspattn;

struct View {
  void* data;
  std::int64_t shape[4];
  std::int64_t stride[4];
  std::int32_t rank;   // 0: absent
  std::int32_t dtype;  // dspattn::DType
};

template <typename Pointer>
BasicTensorView<Pointer> view(const View& v) {
  BasicTensorView<Pointer> result;
  result.data = v.data;
  result.dtype = static_cast<DType>(v.dtype);
  result.rank = v.rank;
  for (std::size_t i = 0; i < 4; ++i) {
    result.shape[i] = v.shape[i];
    result.stride[i] = v.stride[i];
  }
  return result;
}

}  // namespace

struct DspattnCall {
  View q, k, v, out, lse, key_lengths, allowed, bias, cu_q, cu_k;
  std::int64_t max_q, max_k, window_left, window_right;  // windows: -1 for none
  double scale;                                          // 0: default
  void* stream;
  void* workspace;
  std::int64_t workspace_bytes;
  std::int32_t keep, group, consecutive, causal, top_left;
};

namespace {

ForwardArgs args_of(const DspattnCall* call) {
  ForwardArgs args;
  Problem& p = args.problem;
  p.device = {DeviceType::cuda, 0};
  p.q = view<const void*>(call->q);
  p.k = view<const void*>(call->k);
  p.v = view<const void*>(call->v);
  p.pattern = {call->keep, call->group};
  p.grouping = call->consecutive != 0 ? Grouping::consecutive : Grouping::interleaved;
  p.mask.causal = call->causal != 0;
  p.mask.alignment = call->top_left != 0 ? Alignment::top_left : Alignment::bottom_right;
  if (call->window_left >= 0) p.mask.window_left = call->window_left;
  if (call->window_right >= 0) p.mask.window_right = call->window_right;
  p.mask.key_lengths = view<const void*>(call->key_lengths);
  p.mask.allowed = view<const void*>(call->allowed);
  p.mask.bias = view<const void*>(call->bias);
  if (call->scale > 0) p.scale = call->scale;
  if (call->cu_q.rank > 0) {
    p.packed = Packed{view<const void*>(call->cu_q), view<const void*>(call->cu_k), call->max_q, call->max_k};
  }
  args.out = view<void*>(call->out);
  args.lse = view<void*>(call->lse);
  args.run.stream = call->stream;
  args.run.workspace = call->workspace;
  args.run.workspace_bytes = static_cast<std::size_t>(call->workspace_bytes);
  return args;
}

// 0, or the number of characters of the error message written.
template <typename Call>
int reported(char* error, int error_size, Call call) {
  try {
    call();
    return 0;
  } catch (const std::exception& e) {
    std::strncpy(error, e.what(), static_cast<std::size_t>(error_size) - 1);
    error[error_size - 1] = 0;
    return static_cast<int>(std::strlen(error)) + 1;
  }
}

}  // namespace

extern "C" {

int dspattn_bench_workspace(const DspattnCall* call, std::int64_t* bytes, char* error, int error_size) {
  return reported(error, error_size,
                  [&] { *bytes = static_cast<std::int64_t>(forward_workspace_bytes(args_of(call))); });
}

int dspattn_bench_forward(const DspattnCall* call, char* error, int error_size) {
  return reported(error, error_size, [&] { forward(args_of(call)); });
}
}
