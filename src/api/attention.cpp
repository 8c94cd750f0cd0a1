// validate -> choose -> launch.
#include "dspattn/attention.h"

#include <algorithm>
#include <exception>
#include <initializer_list>
#include <new>

#include "api/kernel_table.h"
#include "core/validate.h"

namespace dspattn {
namespace {

void raise_if_any(std::vector<std::string> reasons) {
  if (!reasons.empty()) throw Error(std::move(reasons));
}

void require_workspace(const Execution& run, std::size_t needed) {
  if (run.workspace_bytes < needed || (needed > 0 && run.workspace == nullptr)) {
    throw Error("workspace: expected at least " + std::to_string(needed) + " bytes, got " +
                (run.workspace == nullptr ? "null" : std::to_string(run.workspace_bytes) + " bytes"));
  }
}

template <typename Call>
Status status_of(Call call) noexcept {
  try {
    call();
    return {};
  } catch (const Error& error) {
    return {error.reasons()};
  } catch (const std::exception& error) {
    return {{error.what()}};
  }
}

Results results_of(std::initializer_list<DType> types) {
  return std::ranges::count(types, DType::f32) > 0 ? Results::fp32 : Results::as_inputs;
}

const core::KernelRow& checked_row(const ForwardArgs& args) {
  raise_if_any(core::forward_reasons(args));
  return api::choose_row(args.problem, Pass::forward, args.run.kernel, results_of({args.out.dtype}));
}

const core::KernelRow& checked_row(const BackwardArgs& args) {
  raise_if_any(core::backward_reasons(args));
  const Results results =
      results_of({args.out.dtype, args.d_out.dtype, args.d_q.dtype, args.d_k.dtype, args.d_v.dtype});
  return api::choose_row(args.problem, Pass::backward, args.run.kernel, results);
}

}  // namespace

void forward(const ForwardArgs& args) {
  const core::KernelRow& row = checked_row(args);
  require_workspace(args.run, row.forward_workspace(args));
  row.forward(args);
}

void backward(const BackwardArgs& args) {
  const core::KernelRow& row = checked_row(args);
  require_workspace(args.run, row.backward_workspace(args));
  row.backward(args);
}

Status try_forward(const ForwardArgs& args) noexcept {
  return status_of([&] { forward(args); });
}

Status try_backward(const BackwardArgs& args) noexcept {
  return status_of([&] { backward(args); });
}

std::size_t forward_workspace_bytes(const ForwardArgs& args) { return checked_row(args).forward_workspace(args); }

std::size_t backward_workspace_bytes(const BackwardArgs& args) { return checked_row(args).backward_workspace(args); }

}  // namespace dspattn
