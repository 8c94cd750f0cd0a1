// What the benchmarks in Python call through ctypes: C functions over one struct of plain numbers,
// bench/common/native.py mirrors it field by field. Every function returns 0, or the length of the message it wrote.
//
// New fields are added at the end, so that libraries built before still find theirs.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>

#include "dspattn/attention.h"

namespace dspattn::bench {

struct View {
  void* data;
  std::int64_t shape[4];
  std::int64_t stride[4];
  std::int32_t rank;   // 0: absent
  std::int32_t dtype;  // dspattn::DType
};

struct Call {
  View q, k, v, out, lse, key_lengths, allowed, bias, cu_q, cu_k;
  std::int64_t max_q, max_k, window_left, window_right;  // windows: -1 for none
  double scale;                                          // 0: default
  void* stream;
  void* workspace;
  std::int64_t workspace_bytes;
  std::int32_t keep, group, consecutive, causal, top_left;
  std::int32_t device;  // index of the GPU; -1: the CPU
  // Of the pipeline's functions.
  View counts, columns;  // of the block mask
  void* nonzeros;
  void* metadata;
  std::int32_t block;  // 0: no block mask
  // What goes beyond the plain forward.
  std::int32_t rest_mean, shared_choice;
  char kernel[64];  // a row of the kernel table; empty: the first that fits
  View block_table;
  View d_out, d_q, d_k, d_v, d_lse, d_bias;  // of the backward; out and lse are then those of the forward
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

inline ForwardArgs args_of(const Call& call) {
  ForwardArgs args;
  Problem& p = args.problem;
  if (call.device >= 0) p.device = {DeviceType::cuda, call.device};
  p.q = view<const void*>(call.q);
  p.k = view<const void*>(call.k);
  p.v = view<const void*>(call.v);
  p.pattern = {call.keep, call.group};
  p.grouping = call.consecutive != 0 ? Grouping::consecutive : Grouping::interleaved;
  p.mask.causal = call.causal != 0;
  p.mask.alignment = call.top_left != 0 ? Alignment::top_left : Alignment::bottom_right;
  if (call.window_left >= 0) p.mask.window_left = call.window_left;
  if (call.window_right >= 0) p.mask.window_right = call.window_right;
  p.mask.key_lengths = view<const void*>(call.key_lengths);
  p.mask.allowed = view<const void*>(call.allowed);
  p.mask.bias = view<const void*>(call.bias);
  if (call.scale > 0) p.scale = call.scale;
  if (call.cu_q.rank > 0) {
    p.packed = Packed{view<const void*>(call.cu_q), view<const void*>(call.cu_k), call.max_q, call.max_k};
  }
  p.rest = call.rest_mean != 0 ? Rest::mean : Rest::drop;
  p.choice = call.shared_choice != 0 ? Choice::shared : Choice::each_head;
  p.block_table = view<const void*>(call.block_table);
  args.out = view<void*>(call.out);
  args.lse = view<void*>(call.lse);
  args.run.kernel = call.kernel;
  args.run.stream = call.stream;
  args.run.workspace = call.workspace;
  args.run.workspace_bytes = static_cast<std::size_t>(call.workspace_bytes);
  return args;
}

inline BackwardArgs backward_args_of(const Call& call) {
  const ForwardArgs forward = args_of(call);
  BackwardArgs args;
  args.problem = forward.problem;
  args.out = forward.out;
  args.lse = forward.lse;
  args.d_out = view<const void*>(call.d_out);
  args.d_lse = view<const void*>(call.d_lse);
  args.d_q = view<void*>(call.d_q);
  args.d_k = view<void*>(call.d_k);
  args.d_v = view<void*>(call.d_v);
  args.d_bias = view<void*>(call.d_bias);
  args.run = forward.run;
  return args;
}

template <typename Body>
int reported(char* error, int error_size, Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    std::strncpy(error, e.what(), static_cast<std::size_t>(error_size) - 1);
    error[error_size - 1] = 0;
    return static_cast<int>(std::strlen(error)) + 1;
  }
}

}  // namespace dspattn::bench
