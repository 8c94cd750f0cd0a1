#include "cuda/decode/launch_kernel.h"

namespace dspattn::cuda::decode {

void launch_f32(int dim, const Params& params, std::int64_t ctas, cudaStream_t stream) {
  (dim == 64 ? launch_kernel<DType::f32, 64> : launch_kernel<DType::f32, 128>)(params, ctas, stream);
}

}  // namespace dspattn::cuda::decode
