// A build without CUDA.
#include "cuda/norm_rope/norm_rope.h"

namespace dspattn::cuda {

void norm_rope(const NormRopeArgs&) { throw Error("device: expected cpu, got cuda; this build is without CUDA"); }

}  // namespace dspattn::cuda
