// A build without CUDA.
#include "cuda/value_sums.h"
#include "dspattn/error.h"

namespace dspattn::cuda {

void update_value_sums(const ValueSumsArgs&) {
  throw Error("device: expected cpu, got cuda; this build is without CUDA");
}

}  // namespace dspattn::cuda
