#include "cuda/pipeline/sm80/pv_sparse_launch.cuh"

namespace dspattn::cuda::pipeline {

void launch_pv_sparse_bf16(PvSparseParams params, std::int64_t matrices, void* stream) {
  launch_pv_sparse_of<__nv_bfloat16>(params, matrices, stream);
}

}  // namespace dspattn::cuda::pipeline
