#include "cuda/decode/launch_kernel.h"
#include "cuda/tile/head_dims.h"

namespace dspattn::cuda::decode {

void launch_f16(int dim, const Params& params, std::int64_t ctas, cudaStream_t stream) {
  tile::at_head_dim<tile::kDecodeHeadDims16>(dim, []<int kDim> { return &launch_kernel<DType::f16, kDim>; })(
      params, ctas, stream);
}

}  // namespace dspattn::cuda::decode
