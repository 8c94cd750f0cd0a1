#include "cuda/blocks/tensor_maps.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "dspattn/error.h"

namespace dspattn::cuda::blocks {
namespace {

// The driver's encoder, found at run time: the library does not link the driver, so that it loads without one.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status) !=
            cudaSuccess ||
        status != cudaDriverEntryPointSuccess) {
      found = nullptr;
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return function;
}

template <std::size_t kRank>
void encode_any(CUtensorMap& map, const TmaShape<kRank>& shape, CUtensorMapDataType type) {
  if (encoder() == nullptr) throw Error("cuda: describing a tensor for TMA: the driver has no cuTensorMapEncodeTiled");
  std::array<cuuint64_t, kRank> dims{};
  std::array<cuuint64_t, kRank - 1> strides{};
  std::array<cuuint32_t, kRank> box{}, steps{};
  for (std::size_t i = 0; i < kRank; ++i) {
    dims[i] = static_cast<cuuint64_t>(shape.dims[i]);
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(shape.stride_bytes[i - 1]);
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
    steps[i] = static_cast<cuuint32_t>(shape.steps[i]);
  }
  const CUresult result =
      encoder()(&map, type, static_cast<cuuint32_t>(kRank), const_cast<void*>(shape.data), dims.data(), strides.data(),
                box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error("cuda: describing a tensor for TMA: driver error " + std::to_string(static_cast<int>(result)));
  }
}

}  // namespace

void encode(CUtensorMap& map, const TmaShape<4>& shape, CUtensorMapDataType type) { encode_any(map, shape, type); }
void encode(CUtensorMap& map, const TmaShape<5>& shape, CUtensorMapDataType type) { encode_any(map, shape, type); }

CUtensorMapDataType tma_type(DType type) {
  if (type == DType::f32) return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  return type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

CUtensorMapDataType tma_type(int element_bytes) {
  return element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                              : CU_TENSOR_MAP_DATA_TYPE_UINT32;
}

}  // namespace dspattn::cuda::blocks
