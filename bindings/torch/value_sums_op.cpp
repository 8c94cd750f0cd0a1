// dspattn::update_value_sums for CPU and CUDA tensors, on PyTorch's stable ABI.
#include <torch/csrc/stable/library.h>

#include "dspattn/value_sums.h"
#include "place.h"
#include "stack.h"
#include "views.h"

namespace dspattn::torch_binding {
namespace {

// update_value_sums(sums, v, new_keys, key_lengths, block_table)
void run_update(Stack& stack) {
  const Tensor sums = stack.tensor();
  const Tensor v = stack.tensor();
  ValueSumsArgs args;
  args.new_keys = stack.integer();
  const MaybeTensor key_lengths = stack.maybe_tensor();
  const MaybeTensor block_table = stack.maybe_tensor();
  args.device = device_of(v, "v");
  require_device(sums, "sums", args.device);
  if (key_lengths) require_device(*key_lengths, "key_lengths", args.device);
  if (block_table) require_device(*block_table, "block_table", args.device);
  const DeviceScope scope(args.device);
  args.v = const_view(v, "v");
  args.sums = mutable_view(sums, "sums");
  args.key_lengths = const_view(key_lengths, "key_lengths", "int32");
  args.block_table = const_view(block_table, "block_table", "int32");
  args.stream = execution_on(args.device).stream;
  update_value_sums(args);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dspattn, library) {
  library.def(
      "update_value_sums(Tensor(a!) sums, Tensor v, SymInt new_keys, Tensor? key_lengths=None, "
      "Tensor? block_table=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dspattn, CPU, library) { library.impl("update_value_sums", &boxed<run_update>); }

STABLE_TORCH_LIBRARY_IMPL(dspattn, CUDA, library) { library.impl("update_value_sums", &boxed<run_update>); }

}  // namespace dspattn::torch_binding
