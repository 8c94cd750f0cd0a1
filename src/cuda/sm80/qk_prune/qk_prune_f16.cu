#include "cuda/sm80/qk_prune/launch.cuh"

namespace dspattn::cuda::sm80 {

void launch_qk_prune_f16(QkPruneParams params, std::int64_t matrices, void* stream) {
  launch_qk_prune_of<__half>(params, matrices, stream);
}

}  // namespace dspattn::cuda::sm80
