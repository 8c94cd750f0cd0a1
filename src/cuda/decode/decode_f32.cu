#include "cuda/decode/launch_kernel.h"
#include "cuda/tile/head_dims.h"

namespace dspattn::cuda::decode {

void launch_f32(int dim, const Params& params, std::int64_t ctas, cudaStream_t stream) {
  tile::at_head_dim<tile::kDecodeHeadDims32>(dim, []<int kDim> { return &launch_kernel<DType::f32, kDim>; })(
      params, ctas, stream);
}

}  // namespace dspattn::cuda::decode
