// The tensors of a case: inputs with their random contents, the masks, and the Problem that views them.
#pragma once

#include "check/case.h"
#include "check/tensor.h"

namespace dspattn::check {

// Elements by which a tensor of a layout starts off alignment.
std::int64_t offset_of(Layout layout);

class CaseData {
 public:
  CaseData(const Case& drawn, Device device, core::DeviceMemory& memory);

  const Case& drawn() const { return drawn_; }
  core::DeviceMemory& memory() const { return memory_; }
  const Problem& device_problem() const { return device_problem_; }  // for the kernel
  const Problem& host_problem() const { return host_problem_; }      // the same values for the oracle
  const Tensor& q() const { return q_; }
  const Tensor& k() const { return k_; }
  const Tensor& v() const { return v_; }
  const Tensor& d_out() const { return d_out_; }  // backward only
  const Tensor& d_lse() const { return d_lse_; }  // where the case gives one

  // An output of the case, poisoned on the device: [batch, heads, n_q, width] like q, or [.., n_k, width] like k.
  Tensor output_like_q(std::int64_t width) const;
  Tensor output_like_k(std::int64_t width) const;
  Tensor lse_output() const;
  Tensor d_bias_output() const;
  Tensor d_sinks_output() const;

  // A tensor of rows like k's or v's, as pages where the block table says; the others are poisoned. Where the case has
  // pages.
  Tensor paged(const Tensor& rows, Layout layout) const;

 private:
  void make_values();
  void make_masks();
  void make_features();
  void make_pages();
  void make_value_sums();
  ConstTensorView lse_view() const;
  Tensor output(std::array<std::int64_t, 4> shape) const;
  Problem problem(bool on_device) const;

  Case drawn_;
  Device device_;
  core::DeviceMemory& memory_;
  std::int64_t lead_, rows_q_, rows_k_;  // extents of the tensors: a packed batch has a lead of 1
  Tensor q_, k_, v_, d_out_;
  Tensor key_lengths_, allowed_, bias_, cu_q_, cu_k_;
  Tensor dropout_state_, sinks_, d_lse_;
  Tensor block_table_, k_pages_, v_pages_;
  Tensor value_sums_;
  Problem device_problem_, host_problem_;
};

}  // namespace dspattn::check
