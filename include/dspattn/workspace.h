// Memory for a kernel to work in, owned: on the host or on a GPU, aligned as kernels ask, as large as a call needs.
//
//   dspattn::Workspace workspace;
//   workspace.attach(args);       // args.run.workspace and args.run.workspace_bytes
//   dspattn::forward(args);
//
// One workspace serves any number of calls, one after the other: it grows when a call needs more or is on another
// device, and never shrinks. A program with an allocator of its own asks forward_workspace_bytes() instead and sets
// args.run itself.
#pragma once

#include <cstddef>

#include "dspattn/attention.h"

namespace dspattn {

class Workspace {
 public:
  Workspace() = default;
  Workspace(Workspace&& other) noexcept;
  Workspace& operator=(Workspace&& other) noexcept;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  // Waits for a GPU that may still be using the memory.
  ~Workspace();

  // Lends the memory to a call, after growing it to what the call's kernel needs; what args.run pointed to before is
  // forgotten. Calls that run at the same time (on two threads or two streams) need a workspace each. Growing waits for
  // the GPU, so a call that is captured into a CUDA graph is attached before the capture.
  //
  // Throws Error, with the reasons that forward and backward would give or when the GPU has no such memory, and
  // std::bad_alloc when the host has none.
  void attach(ForwardArgs& args);
  void attach(BackwardArgs& args);
  // The same where the need is known otherwise, as of pipeline_forward with a block mask:
  //   workspace.attach(args.run, args.problem.device, dspattn::pipeline_workspace_bytes(args, blocks));
  void attach(Execution& run, Device device, std::size_t bytes);

  void* data() const noexcept { return data_; }          // null before the first call that needs any
  std::size_t bytes() const noexcept { return bytes_; }  // of the memory there is
  Device device() const noexcept { return device_; }     // where it is

 private:
  void release() noexcept;

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_;
};

}  // namespace dspattn
