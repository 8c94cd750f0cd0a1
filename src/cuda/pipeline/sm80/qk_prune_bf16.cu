#include "cuda/pipeline/sm80/qk_prune_launch.cuh"

namespace dspattn::cuda::pipeline {

void launch_qk_prune_bf16(QkPruneParams params, std::int64_t matrices, void* stream) {
  launch_qk_prune_of<__nv_bfloat16>(params, matrices, stream);
}

}  // namespace dspattn::cuda::pipeline
