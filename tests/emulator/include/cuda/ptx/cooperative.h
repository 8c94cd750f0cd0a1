// CTAs that wait for each other, emulated: as if they were a cluster.
#pragma once

#include <cuda_runtime.h>

#include "emulator/machine.h"

namespace dspattn::cuda::ptx {

inline unsigned arrive_at_grid() { return 0; }
inline void await_grid(unsigned) { emulator::Machine::get().cluster_sync(); }
inline bool arrives_last(unsigned* counter, unsigned count) { return (*counter)++ == count - 1; }

template <typename... Parameters, typename... Arguments>
cudaError_t launch_cooperatively(const cudaLaunchConfig_t& config, void (*kernel)(Parameters...),
                                 const Arguments&... arguments) {
  return emulator::launch(config, config.gridDim.x, [kernel, ... copies = arguments] { kernel(copies...); });
}

}  // namespace dspattn::cuda::ptx
