#include "cuda/pipeline/sm80/pv_sparse_launch.cuh"

namespace dspattn::cuda::pipeline {

void launch_pv_sparse_f16(PvSparseParams params, std::int64_t matrices, void* stream) {
  launch_pv_sparse_of<__half>(params, matrices, stream);
}

}  // namespace dspattn::cuda::pipeline
