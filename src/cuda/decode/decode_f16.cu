#include "cuda/decode/launch_kernel.h"

namespace dspattn::cuda::decode {

void launch_f16(int dim, const Params& params, std::int64_t ctas, cudaStream_t stream) {
  (dim == 64    ? launch_kernel<DType::f16, 64>
   : dim == 128 ? launch_kernel<DType::f16, 128>
                : launch_kernel<DType::f16, 256>)(params, ctas, stream);
}

}  // namespace dspattn::cuda::decode
