// The library's backward behind the C interface of shim.h.
#include "bench/common/shim.h"

using dspattn::bench::backward_args_of;
using dspattn::bench::Call;
using dspattn::bench::reported;

extern "C" {

int dspattn_bench_backward_workspace(const Call* call, std::int64_t* bytes, char* error, int error_size) {
  return reported(error, error_size, [&] {
    *bytes = static_cast<std::int64_t>(dspattn::backward_workspace_bytes(backward_args_of(*call)));
  });
}

int dspattn_bench_backward(const Call* call, char* error, int error_size) {
  return reported(error, error_size, [&] { dspattn::backward(backward_args_of(*call)); });
}
}
