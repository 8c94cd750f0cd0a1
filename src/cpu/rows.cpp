#include "cpu/rows.h"

#include <array>

#include "cpu/reference.h"

namespace dspattn::cpu {
namespace {

core::Reasons serves_everything(const Problem&) { return {}; }
std::size_t no_forward_workspace(const ForwardArgs&) { return 0; }
std::size_t no_backward_workspace(const BackwardArgs&) { return 0; }

constexpr const char* kReferenceSummary = "fp64 oracle, plain loops, one thread: any type, pattern, mask and head dim";

const std::array kRows{
    core::KernelRow{{"cpu_reference", Pass::forward, DeviceType::cpu, kReferenceSummary},
                    serves_everything,
                    no_forward_workspace,
                    reference_forward_kernel,
                    nullptr,
                    nullptr},
    core::KernelRow{{"cpu_reference", Pass::backward, DeviceType::cpu, kReferenceSummary},
                    serves_everything,
                    nullptr,
                    nullptr,
                    no_backward_workspace,
                    reference_backward_kernel},
};

}  // namespace

std::span<const core::KernelRow> rows() { return kRows; }

}  // namespace dspattn::cpu
