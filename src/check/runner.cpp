#include "check/runner.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "dspattn/error.h"

namespace dspattn::check {
namespace {

constexpr std::size_t kWorkspaceGuardBytes = 256;
constexpr std::byte kGuard{0x5a};

template <typename Args, typename Call>
void with_workspace(core::DeviceMemory& memory, Args args, std::size_t bytes, Call call) {
  if (bytes == 0) {
    call(args);
    return;
  }
  std::vector<std::byte> host(bytes + 2 * kWorkspaceGuardBytes, kGuard);
  core::DeviceBuffer buffer(memory, host.size());
  buffer.upload(host.data());
  args.run.workspace = static_cast<std::byte*>(buffer.data()) + kWorkspaceGuardBytes;
  args.run.workspace_bytes = bytes;
  call(args);
  buffer.download(host.data());
  const auto is_guard = [](std::byte value) { return value == kGuard; };
  if (!std::all_of(host.begin(), host.begin() + kWorkspaceGuardBytes, is_guard) ||
      !std::all_of(host.end() - kWorkspaceGuardBytes, host.end(), is_guard)) {
    throw Error("workspace: written outside the " + std::to_string(bytes) + " bytes that were asked for");
  }
}

}  // namespace

Runner library_runner(core::DeviceMemory& memory, const std::string& forward_kernel,
                      const std::string& backward_kernel) {
  Runner runner;
  runner.forward = [&memory, forward_kernel](const ForwardArgs& given) {
    ForwardArgs args = given;
    args.run.kernel = forward_kernel;
    with_workspace(memory, args, forward_workspace_bytes(args), [](const ForwardArgs& a) { forward(a); });
  };
  runner.backward = [&memory, backward_kernel](const BackwardArgs& given) {
    BackwardArgs args = given;
    args.run.kernel = backward_kernel;
    with_workspace(memory, args, backward_workspace_bytes(args), [](const BackwardArgs& a) { backward(a); });
  };
  return runner;
}

}  // namespace dspattn::check
