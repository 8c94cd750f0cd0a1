#include "cuda/pipeline/sm80/qk_prune_launch.cuh"

namespace dspattn::cuda::pipeline {

void launch_qk_prune_f32(QkPruneParams params, std::int64_t matrices, void* stream) {
  launch_qk_prune_of<float>(params, matrices, stream);
}

}  // namespace dspattn::cuda::pipeline
