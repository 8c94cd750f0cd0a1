// Hints, which change nothing.
#pragma once

namespace dspattn::cuda::ptx {

inline void prefetch_line(const void*) {}

}  // namespace dspattn::cuda::ptx
