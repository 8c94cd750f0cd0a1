// Chooses the kernel of a softmax launch and makes it.
#include <algorithm>

#include "cuda/device/device.h"
#include "cuda/pipeline/sm80/launch.h"
#include "cuda/pipeline/sm80/softmax.cuh"

namespace dspattn::cuda::pipeline {
namespace {

template <typename Element, int kVectors>
void launch_registers(const SoftmaxParams& params, int lanes, cudaStream_t stream) {
  const std::int64_t rows_per_cta = kSoftmaxThreads / lanes;
  const std::int64_t rows = params.matrices * params.matrix.rows;
  launch("softmax", softmax_registers<Element, kVectors>,
         {.ctas = grid_of((rows + rows_per_cta - 1) / rows_per_cta), .threads = kSoftmaxThreads}, stream, params,
         lanes);
}

template <typename Element>
void launch_rows(const SoftmaxParams& params, cudaStream_t stream) {
  constexpr int kVectorElements = kChunkBytes / static_cast<int>(sizeof(Element));
  const std::int64_t vectors = params.matrix.places / 2 / kVectorElements;
  // Three or four vectors a lane while 32 lanes suffice, fewer lanes for short rows; then up to 64 values a lane. The
  // smallest number that holds the row: lanes without a vector are reads that are not in flight.
  int lanes = 4;
  while (lanes < 32 && lanes * 4 < vectors) lanes *= 2;
  if (vectors <= 3 * lanes) {
    // 48 bytes a lane are too few in flight for 16-bit types (82 % of the copy's rate at 384 keys): half the lanes,
    // twice the vectors.
    if (sizeof(Element) == 2 && lanes > 4) return launch_registers<Element, 6>(params, lanes / 2, stream);
    return launch_registers<Element, 3>(params, lanes, stream);
  }
  if (vectors <= 4 * lanes) return launch_registers<Element, 4>(params, lanes, stream);
  if (vectors <= 6 * lanes) return launch_registers<Element, 6>(params, lanes, stream);
  if (vectors <= 8 * lanes) return launch_registers<Element, 8>(params, lanes, stream);
  if constexpr (sizeof(Element) == 4) {
    if (vectors <= 12 * lanes) return launch_registers<Element, 12>(params, lanes, stream);
    if (vectors <= 16 * lanes) return launch_registers<Element, 16>(params, lanes, stream);
  }
  constexpr int kReserved = 1024;  // static shared memory of the kernel, rounded up
  const int room = current_device_facts().shared_bytes - kReserved;
  const std::int64_t fits = room / kChunkBytes;
  const int cached = vectors <= fits ? static_cast<int>(vectors) : 0;
  allow_shared_memory(softmax_shared<Element>, room);
  cuda::launch("softmax", softmax_shared<Element>,
               {.ctas = grid_of(params.matrices * params.matrix.rows),
                .threads = kSoftmaxRowThreads,
                .shared_bytes = cached * kChunkBytes},
               stream, params, cached);
}

}  // namespace

void launch_softmax(DType dtype, const SoftmaxParams& params, void* stream) {
  const auto handle = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case DType::bf16:
      launch_rows<__nv_bfloat16>(params, handle);
      break;
    case DType::f16:
      launch_rows<__half>(params, handle);
      break;
    default:
      launch_rows<float>(params, handle);
      break;
  }
}

}  // namespace dspattn::cuda::pipeline
