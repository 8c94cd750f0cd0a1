#include "cuda/norm_rope/norm_rope.h"

#include "cuda/device/device.h"
#include "cuda/norm_rope/launch.h"
#include "cuda/norm_rope/plan.h"

namespace dspattn::cuda {

void norm_rope(const NormRopeArgs& args) {
  const DeviceFacts& device = device_facts(args.device.index);
  if (!device.present) throw Error("device: " + device.absence);
  const norm_rope_kernel::Plan plan = norm_rope_kernel::plan_of(args);
  if (plan.ctas == 0) return;
  const CurrentDevice current(args.device.index);
  norm_rope_kernel::launch_norm_rope(plan, static_cast<cudaStream_t>(args.run.stream));
}

}  // namespace dspattn::cuda
