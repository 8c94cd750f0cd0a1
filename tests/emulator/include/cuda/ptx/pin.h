// Limits to what a compiler may move: none are needed here.
#pragma once

namespace dspattn::cuda::ptx {

template <int kCount>
void pin_accumulators(float (&)[kCount]) {}

}  // namespace dspattn::cuda::ptx
