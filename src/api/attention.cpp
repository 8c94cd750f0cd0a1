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

void require_workspace(const Execution& run, std::size_t needed) {
  if (run.workspace_bytes < needed || (needed > 0 && run.workspace == nullptr)) {
    throw Error("workspace: expected at least " + std::to_string(needed) + " bytes, got " +
                (run.workspace == nullptr ? "null" : std::to_string(run.workspace_bytes) + " bytes"));
  }
  if (reinterpret_cast<std::uintptr_t>(run.workspace) % core::kWorkspaceAlignment != 0) {
    throw Error("workspace: expected an address aligned to " + std::to_string(core::kWorkspaceAlignment) +
                " bytes, got one that is not");
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
  core::raise_if_any(core::forward_reasons(args));
  return api::choose_row(args.problem, Pass::forward, args.run.kernel,
                         api::needed_by(args.problem, results_of({args.out.dtype})));
}

const core::KernelRow& checked_row(const BackwardArgs& args) {
  core::raise_if_any(core::backward_reasons(args));
  const Results results =
      results_of({args.out.dtype, args.d_out.dtype, args.d_q.dtype, args.d_k.dtype, args.d_v.dtype});
  core::Features needed = api::needed_by(args.problem, results);
  if (args.d_lse.present()) needed.add(core::Feature::d_lse);
  if (args.d_bias.present()) needed.add(core::Feature::d_bias);
  if (args.d_sinks.present()) needed.add(core::Feature::d_sinks);
  return api::choose_row(args.problem, Pass::backward, args.run.kernel, needed);
}

}  // namespace

Prepared<ForwardArgs>::Prepared(const ForwardArgs& args)
    : args_(args), row_(&checked_row(args)), workspace_bytes_(row_->forward_workspace(args)) {}

void Prepared<ForwardArgs>::run(void* workspace, std::size_t bytes) {
  core::raise_if_any(core::length_reasons(args_.problem));
  args_.run.workspace = workspace;
  args_.run.workspace_bytes = bytes;
  require_workspace(args_.run, workspace_bytes_);
  row_->forward(args_);
}

Prepared<BackwardArgs>::Prepared(const BackwardArgs& args)
    : args_(args), row_(&checked_row(args)), workspace_bytes_(row_->backward_workspace(args)) {}

void Prepared<BackwardArgs>::run(void* workspace, std::size_t bytes) {
  core::raise_if_any(core::length_reasons(args_.problem));
  args_.run.workspace = workspace;
  args_.run.workspace_bytes = bytes;
  require_workspace(args_.run, workspace_bytes_);
  row_->backward(args_);
}

void forward(const ForwardArgs& args) { Prepared(args).run(args.run.workspace, args.run.workspace_bytes); }

void backward(const BackwardArgs& args) { Prepared(args).run(args.run.workspace, args.run.workspace_bytes); }

Status try_forward(const ForwardArgs& args) noexcept {
  return status_of([&] { forward(args); });
}

Status try_backward(const BackwardArgs& args) noexcept {
  return status_of([&] { backward(args); });
}

std::size_t forward_workspace_bytes(const ForwardArgs& args) { return Prepared(args).workspace_bytes(); }

std::size_t backward_workspace_bytes(const BackwardArgs& args) { return Prepared(args).workspace_bytes(); }

}  // namespace dspattn
