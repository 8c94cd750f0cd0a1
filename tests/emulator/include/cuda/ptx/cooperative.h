// CTAs that wait for each other, emulated: those of a cooperative launch run side by side, as if they were a cluster.
#pragma once

#include <cuda_runtime.h>

#include "emulator/machine.h"

namespace dspattn::cuda::ptx {

inline emulator::WaitList& waiting_for_arrivals() {
  static thread_local emulator::WaitList list;
  return list;
}
inline void arrive_at(unsigned* counter) {
  ++*counter;
  emulator::Machine::get().wake(waiting_for_arrivals());
}
inline void await_arrivals(const unsigned* counter, unsigned count) {
  while (*counter < count) emulator::Machine::get().wait(waiting_for_arrivals(), "arrivals");
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_cooperatively(const cudaLaunchConfig_t& config, void (*kernel)(Parameters...),
                                 const Arguments&... arguments) {
  return emulator::launch(config, config.gridDim.x, [kernel, ... copies = arguments] { kernel(copies...); });
}

}  // namespace dspattn::cuda::ptx
