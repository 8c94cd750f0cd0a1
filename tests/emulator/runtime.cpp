#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <string>

namespace {

// Few, so that every block has several items to work on.
constexpr int kMultiprocessors = 3;

thread_local std::string last_failure;

// As the CUDA programming guide has it: 9.0, 8.0 and 8.7, 8.6 and 8.9.
int shared_bytes_of_a_block() {
  const auto [major, minor] = dspattn::emulator::capability();
  if (major == 9) return static_cast<int>(dspattn::emulator::kSharedBytes);
  return (minor == 0 || minor == 7 ? 163 : 99) * 1024;
}

}  // namespace

// The C library declares this name of the device's function, and has none.
extern "C" float __log2f(float x) noexcept { return std::log2(x); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const auto [major, minor] = dspattn::emulator::capability();
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = minor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = shared_bytes_of_a_block();
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  const auto [major, minor] = dspattn::emulator::capability();
  std::strcpy(properties->name, major == 9 ? "emulated Hopper" : "emulated Ampere");
  properties->major = major;
  properties->minor = minor;
  properties->multiProcessorCount = kMultiprocessors;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? last_failure.c_str() : error == cudaSuccess ? "no error" : "invalid value";
}

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  // No byte more than was asked for: AddressSanitizer then sees what reads past it.
  if (posix_memalign(address, 256, std::max<std::size_t>(bytes, 1)) != 0) return cudaErrorInvalidValue;
  std::memset(*address, 0xCB, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  std::free(address);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new EmulatedStream;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream->captures = new EmulatedGraph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->captures;
  stream->captures = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new EmulatedGraph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& launch : executable->launches) {
    if (const cudaError_t error = launch(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

// Refuses a second number for a kernel: of two threads that launch it, one would take the other's permission.
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (value > shared_bytes_of_a_block()) return cudaErrorInvalidValue;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  static std::mutex mutex;
  static std::map<const void*, int> allowed;
  const std::lock_guard lock(mutex);
  return allowed.emplace(function, value).first->second == value ? cudaSuccess : cudaErrorInvalidValue;
}

namespace {

int bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    default:
      return 4;
  }
}

// Refuses what the driver documents as invalid (cuTensorMapEncodeTiled).
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                      const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {};
  const int bytes = bytes_of(type);
  if (rank < 3 || rank > 5 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B) return CUDA_ERROR_INVALID_VALUE;
  if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  if (box[0] * static_cast<cuuint32_t>(bytes) > 128) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (extents[i] == 0 || extents[i] > cuuint64_t{1} << 32) return CUDA_ERROR_INVALID_VALUE;
    if (box[i] == 0 || box[i] > 256 || steps[i] == 0 || steps[i] > 8) return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= cuuint64_t{1} << 40)) return CUDA_ERROR_INVALID_VALUE;
    map->extents[i] = static_cast<std::int64_t>(extents[i]);
    map->box[i] = static_cast<int>(box[i]);
    map->steps[i] = static_cast<int>(steps[i]);
    if (i > 0) map->strides[i - 1] = static_cast<std::int64_t>(strides[i - 1]);
  }
  map->rank = static_cast<int>(rank);
  map->element_bytes = bytes;
  map->rounds_to_tf32 = type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  map->data = data;
  return CUDA_SUCCESS;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&encode_tiled) : nullptr;
  *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

namespace dspattn::emulator {

cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> body) {
  unsigned blocks = 1;  // of a cluster
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) blocks = config.attrs[i].val.clusterDim.x;
  }
  // Blocks that tell each other something must come to their end either way.
  constexpr unsigned kMost = 16;
  if (blocks == 1 && config.gridDim.x <= kMost && std::getenv("DSPATTN_EMULATOR_SIDE_BY_SIDE") != nullptr) {
    blocks = config.gridDim.x;
  }
  return launch(config, blocks, std::move(body));
}

cudaError_t launch(const cudaLaunchConfig_t& config, unsigned blocks, std::function<void()> body) {
  if (config.stream != nullptr && config.stream->captures != nullptr) {
    cudaLaunchConfig_t later = config;
    later.stream = nullptr;
    config.stream->captures->launches.push_back(
        [later, blocks, body = std::move(body)] { return launch(later, blocks, body); });
    return cudaSuccess;
  }
  if (blocks == 0 || config.gridDim.x % blocks != 0) return cudaErrorInvalidValue;
  if (config.dynamicSmemBytes > static_cast<std::size_t>(shared_bytes_of_a_block())) return cudaErrorInvalidValue;
  const auto index_of = [](const dim3& x) { return Index{x.x, x.y, x.z}; };
  try {
    for (unsigned z = 0; z < config.gridDim.z; ++z) {
      for (unsigned y = 0; y < config.gridDim.y; ++y) {
        for (unsigned x = 0; x < config.gridDim.x; x += blocks) {
          Machine::get().run_cluster(index_of(config.gridDim), index_of(config.blockDim), {x, y, z},
                                     static_cast<int>(blocks), static_cast<std::uint32_t>(config.dynamicSmemBytes),
                                     body);
        }
      }
    }
  } catch (const std::exception& error) {
    last_failure = error.what();
    return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

}  // namespace dspattn::emulator
