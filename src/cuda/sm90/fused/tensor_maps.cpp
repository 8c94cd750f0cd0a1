#include "cuda/sm90/fused/tensor_maps.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <array>

#include "cuda/tile/mask_map.h"

namespace dspattn::cuda::sm90 {
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

bool aligned(const Rows& tensor, DType type) {
  const auto bytes = static_cast<std::int64_t>(size_bytes(type));
  return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 && tensor.row_stride * bytes % 16 == 0 &&
         tensor.head_stride * bytes % 16 == 0 && tensor.batch_stride * bytes % 16 == 0;
}

// fp32 is rounded to tf32 on the way.
CUtensorMapDataType element_of(DType type) {
  if (type == DType::f32) return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  return type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

std::int64_t bytes_of(DType type) { return static_cast<std::int64_t>(size_bytes(type)); }

// Columns of a box: 128 bytes, one row of the swizzle.
int box_columns(DType type) { return 128 / static_cast<int>(size_bytes(type)); }

// `least_stride`: 0 where rows may repeat.
template <std::size_t kRank>
bool encode(CUtensorMap& map, CUtensorMapDataType type, std::int64_t element_bytes, const void* data,
            const std::array<std::int64_t, kRank>& dims, const std::array<std::int64_t, kRank - 1>& strides,
            const std::array<int, kRank>& box, const std::array<int, kRank>& steps, std::int64_t least_stride = 1) {
  if (encoder() == nullptr || data == nullptr) return false;
  std::array<cuuint64_t, kRank> extents{};
  std::array<cuuint64_t, kRank - 1> bytes{};
  std::array<cuuint32_t, kRank> boxes{}, traversal{};
  for (std::size_t i = 0; i < kRank; ++i) {
    if (dims[i] < 1 || dims[i] > (std::int64_t{1} << 32)) return false;
    extents[i] = static_cast<cuuint64_t>(dims[i]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    traversal[i] = static_cast<cuuint32_t>(steps[i]);
    if (i + 1 == kRank) continue;
    // The stride of a dimension of one is never used, but must be valid.
    const std::int64_t stride = dims[i + 1] == 1 ? 16 : strides[i] * element_bytes;
    if (stride < least_stride || stride >= (std::int64_t{1} << 40)) return false;
    bytes[i] = static_cast<cuuint64_t>(stride);
  }
  return encoder()(&map, type, static_cast<cuuint32_t>(kRank), const_cast<void*>(data), extents.data(), bytes.data(),
                   boxes.data(), traversal.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// (column, element of `elements` a distance of element_rows apart, row, head, batch).
bool encode_keys(CUtensorMap& map, const Rows& tensor, const Extents& extents, DType type, int elements,
                 int element_rows, int element_box, int row_box, int row_step) {
  if (!aligned(tensor, type)) return false;
  return encode<5>(map, element_of(type), bytes_of(type), tensor.data,
                   {extents.columns, elements, extents.rows, extents.heads, extents.batch},
                   {element_rows * tensor.row_stride, tensor.row_stride, tensor.head_stride, tensor.batch_stride},
                   {box_columns(type), element_box, row_box, 1, 1}, {1, 1, row_step, 1, 1});
}

}  // namespace

bool make_rows_map(CUtensorMap& map, const Rows& tensor, const Extents& extents, DType type, int rows, int row_step) {
  if (!aligned(tensor, type)) return false;
  return encode<4>(map, element_of(type), bytes_of(type), tensor.data,
                   {extents.columns, extents.rows, extents.heads, extents.batch},
                   {tensor.row_stride, tensor.head_stride, tensor.batch_stride},
                   {box_columns(type), rows * row_step, 1, 1}, {1, row_step, 1, 1});
}

bool make_q_map(CUtensorMap& map, const Rows& tensor, const Extents& extents, DType type, int tile_q) {
  return make_rows_map(map, tensor, extents, type, tile_q, 1);
}

bool make_out_map(CUtensorMap& map, const Rows& tensor, const Extents& extents, DType type, int rows) {
  return make_rows_map(map, tensor, extents, type, rows, 1);
}

bool make_k_map(CUtensorMap& map, const Rows& tensor, const Extents& extents, DType type, const tile::KeyMap& keys,
                int tile_k) {
  // One half of the tile: pairs of keys pair_step apart, one pair a group.
  return encode_keys(map, tensor, extents, type, 2, keys.pair_step, 2, keys.group_step * tile_k / 4, keys.group_step);
}

bool make_v_map(CUtensorMap& map, const Rows& tensor, const Extents& extents, DType type, const tile::KeyMap& keys,
                int tile_k) {
  // Rows in group order. Consecutive groups: as they lie. Otherwise the elements that are not neighbours form the inner
  // dimension: all four (2:4), or the two of each pair (1:2).
  if (keys.pair_step == 1) return encode_keys(map, tensor, extents, type, 1, 1, 1, tile_k, 1);
  const int elements = keys.half_step == 1 ? 2 : 4;
  return encode_keys(map, tensor, extents, type, elements, keys.pair_step, elements, tile_k / elements, 1);
}

bool make_mask_map(CUtensorMap& map, const MaskTensor& mask, const Extents& extents, int element_bytes) {
  const auto multiple = [&](std::int64_t stride) { return stride * element_bytes % 16 == 0; };
  if (mask.key_stride != 1 || reinterpret_cast<std::uintptr_t>(mask.data) % 16 != 0 || !multiple(mask.row_stride) ||
      !multiple(mask.head_stride) || !multiple(mask.batch_stride)) {
    return false;
  }
  const CUtensorMapDataType type = element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                        : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  // A mask that is the same for all heads or sequences is asked for as the first one's; rows repeat by their stride.
  const std::int64_t heads = mask.head_stride == 0 ? 1 : extents.heads;
  const std::int64_t batch = mask.batch_stride == 0 ? 1 : extents.batch;
  return encode<4>(map, type, element_bytes, mask.data, {extents.columns, extents.rows, heads, batch},
                   {mask.row_stride, mask.head_stride, mask.batch_stride}, {128 / element_bytes, tile::kMaskRows, 1, 1},
                   {1, 1, 1, 1}, 0);
}

}  // namespace dspattn::cuda::sm90
