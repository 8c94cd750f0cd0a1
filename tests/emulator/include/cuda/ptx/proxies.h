// The emulator's form of src/cuda/ptx/proxies.h: one memory, which copies read when they happen.
#pragma once

namespace dspattn::cuda::ptx {

inline void fence_async_proxy_global() {}

}  // namespace dspattn::cuda::ptx
