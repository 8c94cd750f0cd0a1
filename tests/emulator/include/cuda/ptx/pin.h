// Limits to what a compiler may move: none are needed here.
#pragma once

#include <cstdint>

namespace dspattn::cuda::ptx {

template <int kCount>
void pin_accumulators(float (&)[kCount]) {}

inline void pin(std::uint32_t&) {}
inline int opaque(int value) { return value; }
inline std::uint32_t held(std::uint32_t value) { return value; }

}  // namespace dspattn::cuda::ptx
