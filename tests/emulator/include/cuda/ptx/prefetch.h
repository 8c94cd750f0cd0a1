// Memory asked for ahead of time, emulated: it must be there.
#pragma once

namespace dspattn::cuda::ptx {

inline void prefetch_to_l2(const void* address) { static_cast<void>(*static_cast<const volatile char*>(address)); }

}  // namespace dspattn::cuda::ptx
