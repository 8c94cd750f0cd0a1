#include "dspattn/workspace.h"

#include <exception>
#include <utility>

#include "api/device_memory.h"

namespace dspattn {
namespace {

bool same(Device a, Device b) { return a.type == b.type && a.index == b.index; }

}  // namespace

Workspace::Workspace(Workspace&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), device_(other.device_) {}

Workspace& Workspace::operator=(Workspace&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    device_ = other.device_;
  }
  return *this;
}

Workspace::~Workspace() { release(); }

void Workspace::release() noexcept {
  if (data_ == nullptr) return;
  try {
    core::DeviceMemory& memory = api::memory_of(device_);
    std::byte nothing{};
    memory.copy_out(&nothing, data_, 0);  // no bytes: it waits for what was enqueued
    memory.release(data_);
  } catch (const std::exception&) {
    // A GPU that failed: its memory goes with the context, and the next call on it says what happened.
  }
  data_ = nullptr;
  bytes_ = 0;
}

void Workspace::attach(Execution& run, Device device, std::size_t bytes) {
  run.workspace = nullptr;
  run.workspace_bytes = 0;
  if (bytes > 0 && (bytes > bytes_ || !same(device, device_))) {
    release();  // first: the old and the new together may be more than there is
    data_ = api::memory_of(device).allocate(bytes);
    bytes_ = bytes;
    device_ = device;
  }
  if (bytes == 0) return;
  run.workspace = data_;
  run.workspace_bytes = bytes_;
}

void Workspace::attach(ForwardArgs& args) {
  attach(args.run, args.problem.device, 0);  // validation looks at the workspace, and this one may be gone
  attach(args.run, args.problem.device, forward_workspace_bytes(args));
}

void Workspace::attach(BackwardArgs& args) {
  attach(args.run, args.problem.device, 0);
  attach(args.run, args.problem.device, backward_workspace_bytes(args));
}

}  // namespace dspattn
