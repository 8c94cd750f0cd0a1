// The library's forward behind the C interface of shim.h. bench/variants links this file alone, over some instances of
// the fused kernel.
#include "bench/common/shim.h"

using dspattn::bench::args_of;
using dspattn::bench::Call;
using dspattn::bench::reported;

extern "C" {

int dspattn_bench_workspace(const Call* call, std::int64_t* bytes, char* error, int error_size) {
  return reported(error, error_size,
                  [&] { *bytes = static_cast<std::int64_t>(dspattn::forward_workspace_bytes(args_of(*call))); });
}

int dspattn_bench_forward(const Call* call, char* error, int error_size) {
  return reported(error, error_size, [&] { dspattn::forward(args_of(*call)); });
}
}
