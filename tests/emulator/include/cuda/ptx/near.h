// Memory brought to a cache, emulated: read at once, so that an address outside of all tensors is found.
#pragma once

namespace dspattn::cuda::ptx {

inline void bring_near(const void* address) { static_cast<void>(*static_cast<const volatile char*>(address)); }

inline int peek(const int* address) { return *address; }

}  // namespace dspattn::cuda::ptx
