// The checks flag kernels with a fault: a check that cannot fail proves nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "check/check.h"
#include "check/problems.h"
#include "core/device_memory.h"
#include "core/geometry.h"
#include "core/half.h"
#include "cpu/reference.h"

namespace dspattn::check {
namespace {

struct Fault {
  const char* name;
  std::function<bool(const Case&)> shows;  // cases in which the fault must change something
  std::function<Runner(Runner)> inject;
};

Fault in_problem(const char* name, std::function<bool(const Case&)> shows, std::function<void(Problem&)> change) {
  return {name, std::move(shows), [change](const Runner& good) {
            Runner bad = good;
            bad.forward = [good, change](const ForwardArgs& given) {
              ForwardArgs args = given;
              change(args.problem);
              good.forward(args);
            };
            return bad;
          }};
}

// The fault happens in backward only: forward keeps the right selection.
Fault in_backward_problem(const char* name, std::function<bool(const Case&)> shows,
                          std::function<void(Problem&)> change) {
  return {name, std::move(shows), [change](const Runner& good) {
            Runner bad = good;
            bad.backward = [good, change](const BackwardArgs& given) {
              BackwardArgs args = given;
              change(args.problem);
              good.backward(args);
            };
            return bad;
          }};
}

Fault after_forward(const char* name, std::function<bool(const Case&)> shows,
                    std::function<void(const ForwardArgs&)> spoil) {
  return {name, std::move(shows), [spoil](const Runner& good) {
            Runner bad = good;
            bad.forward = [good, spoil](const ForwardArgs& args) {
              good.forward(args);
              spoil(args);
            };
            return bad;
          }};
}

Fault after_backward(const char* name, std::function<bool(const Case&)> shows,
                     std::function<void(const BackwardArgs&)> spoil) {
  return {name, std::move(shows), [spoil](const Runner& good) {
            Runner bad = good;
            bad.backward = [good, spoil](const BackwardArgs& args) {
              good.backward(args);
              spoil(args);
            };
            return bad;
          }};
}

// Values in which a fault shows.
bool ordinary(const Case& c) {
  return !c.nan_in_k && !c.nan_in_q && c.ordinary() && c.dropout == 0 && !c.soft_cap && !c.sinks;
}
bool sees_all(const Case& c) {
  return !c.packed && !c.causal && !c.window_left && !c.window_right && c.key_lengths.empty() && !c.allowed &&
         !c.bias && c.batch > 0 && c.n_q > 0 && c.n_k > 0;
}
bool plain(const Case& c) { return sees_all(c) && ordinary(c) && c.n_q > 2 && c.n_k > 40; }
// Some group has more keys than stay. An interleaved group is whole only in a full block.
bool prunes(const Case& c) {
  return plain(c) && !c.pattern.is_dense() && (c.grouping == Grouping::consecutive || c.n_k >= 128);
}
bool forward_only(const Case& c) { return c.pass == Pass::forward; }
bool unmasked_by_tensors(const Case& c) {
  return !c.packed && c.key_lengths.empty() && !c.allowed && !c.bias && ordinary(c) && !c.window_left && c.batch > 0;
}

// The last element of a tensor, in elements from its first.
std::int64_t last_offset(const TensorView& view) {
  std::int64_t offset = 0;
  for (int dim = 0; dim < view.rank; ++dim) offset += (view.extent(dim) - 1) * view.step(dim);
  return offset;
}

void multiply_last(const TensorView& view, double factor) {
  const std::int64_t at = last_offset(view);
  core::store_element(view.data, view.dtype, at, core::load_element(view.data, view.dtype, at) * factor);
}

// Attention with K and V in reverse order: the same groups (of a length that fills them), but ties keep the higher key.
Runner with_ties_reversed(const Runner& good) {
  Runner bad = good;
  bad.forward = [good](const ForwardArgs& given) {
    ForwardArgs args = given;
    std::vector<std::vector<std::byte>> memory;
    for (ConstTensorView* view : {&args.problem.k, &args.problem.v}) {
      ConstTensorView reversed(nullptr, view->dtype,
                               {view->extent(0), view->extent(1), view->extent(2), view->extent(3)});
      memory.emplace_back(static_cast<std::size_t>(reversed.elements()) * size_bytes(view->dtype));
      reversed.data = memory.back().data();
      std::int64_t at = 0;
      for (std::int64_t b = 0; b < view->extent(0); ++b) {
        for (std::int64_t h = 0; h < view->extent(1); ++h) {
          for (std::int64_t i = view->extent(2); i-- > 0;) {
            for (std::int64_t c = 0; c < view->extent(3); ++c) {
              const std::int64_t from = b * view->step(0) + h * view->step(1) + i * view->step(2) + c;
              core::store_element(memory.back().data(), view->dtype, at++,
                                  core::load_element(view->data, view->dtype, from));
            }
          }
        }
      }
      *view = reversed;
    }
    good.forward(args);
  };
  return bad;
}

// What the mean brings to the first row is a hundredth too much.
void spoil_mean(const ForwardArgs& args) {
  if (args.problem.rest == Rest::drop) return;
  const cpu::Reference oracle = cpu::reference_forward(args.problem);
  double rest = 0;
  for (std::int64_t j = 0; j < args.problem.k.extent(2); ++j) {
    if (!oracle.selection.at(0, j)) rest += std::exp(oracle.scores.at(0, j) - oracle.lse[0]);
  }
  for (std::int64_t c = 0; c < args.out.extent(3); ++c) {
    const double value = core::load_element(args.out.data, args.out.dtype, c);
    core::store_element(args.out.data, args.out.dtype, c,
                        value + 0.01 * rest * oracle.means[static_cast<std::size_t>(c)]);
  }
}

// Values in which a fault of something beyond the plain contract shows.
bool shows(const Case& c) {
  return sees_all(c) && c.ordinary() && !c.nan_in_k && !c.nan_in_q && c.rest == Rest::drop && c.dtype == DType::f32 &&
         c.n_q > 2 && c.n_k > 40;
}

std::vector<Fault> training_faults() {
  return {
      in_problem(
          "drops other weights", [](const Case& c) { return shows(c) && c.dropout > 0 && c.dropout < 0.6; },
          [](Problem& p) { p.dropout.state = {}, p.dropout.seed += 1; }),
      in_backward_problem(
          "drops other weights in backward",
          [](const Case& c) { return shows(c) && c.pass == Pass::backward && c.dropout > 0 && c.dropout < 0.6; },
          [](Problem& p) { p.dropout.state = {}, p.dropout.offset += 1; }),
      in_problem(
          "drops nothing", [](const Case& c) { return shows(c) && c.dropout > 0 && c.dropout < 0.6; },
          [](Problem& p) { p.dropout = {}; }),
      in_problem(
          "knows no soft cap", [](const Case& c) { return shows(c) && c.soft_cap && *c.soft_cap < 6; },
          [](Problem& p) { p.soft_cap.reset(); }),
      in_backward_problem(
          "knows no soft cap in backward",
          [](const Case& c) { return shows(c) && c.pass == Pass::backward && c.soft_cap && *c.soft_cap < 1; },
          [](Problem& p) { p.soft_cap.reset(); }),
      in_problem(
          "knows no sinks", [](const Case& c) { return shows(c) && c.sinks && c.heads > 1; },
          [](Problem& p) { p.sinks = {}; }),
      {"forgets the gradient through the LSE", [](const Case& c) { return shows(c) && c.d_lse && c.dropout == 0; },
       [](const Runner& good) {
         Runner bad = good;
         bad.backward = [good](const BackwardArgs& given) {
           BackwardArgs args = given;
           args.d_lse = {};
           good.backward(args);
         };
         return bad;
       }},
      after_backward(
          "loses a part of the bias' gradient",
          [](const Case& c) {
            return c.d_bias && c.n_q > 2 && c.n_k > 20 && c.batch > 0 && !c.packed && !c.causal && !c.window_left &&
                   !c.window_right && c.key_lengths.empty() && !c.allowed && ordinary(c) && c.dtype == DType::f32;
          },
          [](const BackwardArgs& a) {
            core::store_element(a.d_bias.data, a.d_bias.dtype, 0,
                                0.05 + core::load_element(a.d_bias.data, a.d_bias.dtype, 0));
          }),
      after_backward(
          "errs in the sinks' gradient", [](const Case& c) { return shows(c) && c.d_sinks && c.dropout == 0; },
          [](const BackwardArgs& a) {
            core::store_element(a.d_sinks.data, DType::f32, 0,
                                0.05 + core::load_element(a.d_sinks.data, DType::f32, 0));
          }),
  };
}

std::vector<Fault> faults() {
  return {
      in_problem(
          "keeps one fewer", [](const Case& c) { return prunes(c) && c.pattern.keep > 1; },
          [](Problem& p) { --p.pattern.keep; }),
      in_problem(
          "keeps one more", [](const Case& c) { return prunes(c) && c.pattern.keep + 1 < c.pattern.group; },
          [](Problem& p) { ++p.pattern.keep; }),
      in_problem(
          "prunes nothing", [](const Case& c) { return prunes(c); }, [](Problem& p) { p.pattern = Pattern::dense(); }),
      in_problem(
          "groups the wrong way",
          [](const Case& c) {
            return plain(c) && !c.pattern.is_dense() && c.grouping == Grouping::interleaved && c.pattern.group <= 4 &&
                   c.n_k > 140;
          },
          [](Problem& p) { p.grouping = Grouping::consecutive; }),
      {"breaks ties towards the higher key",
       [](const Case& c) {
         return plain(c) && c.integers && !c.pattern.is_dense() && c.grouping == Grouping::consecutive &&
                c.n_k % c.pattern.group == 0 && c.pattern.group <= 8;
       },
       with_ties_reversed},
      in_problem(
          "drops the causal mask",
          [](const Case& c) { return unmasked_by_tensors(c) && c.causal && c.n_q > 3 && c.n_k >= c.n_q; },
          [](Problem& p) { p.mask.causal = false; }),
      in_problem(
          "is off by one at the diagonal",
          [](const Case& c) { return unmasked_by_tensors(c) && c.causal && c.n_q > 3 && c.n_k >= c.n_q; },
          [](Problem& p) {
            p.mask.causal = false;
            p.mask.window_right = 1;
          }),
      in_problem(
          "aligns the diagonal to the other corner",
          [](const Case& c) { return unmasked_by_tensors(c) && c.causal && c.n_q > 3 && c.n_k > c.n_q; },
          [](Problem& p) {
            p.mask.alignment =
                p.mask.alignment == Alignment::bottom_right ? Alignment::top_left : Alignment::bottom_right;
          }),
      in_problem(
          "is off by one at the window",
          [](const Case& c) {
            return !c.packed && c.key_lengths.empty() && !c.allowed && !c.bias && ordinary(c) && c.batch > 0 &&
                   c.window_left && *c.window_left + 8 < c.n_k && c.n_q == c.n_k;
          },
          [](Problem& p) { ++*p.mask.window_left; }),
      in_problem(
          "drops the boolean mask",
          [](const Case& c) {
            return c.allowed && !c.packed && !c.causal && !c.window_left && !c.window_right && c.key_lengths.empty() &&
                   !c.bias && ordinary(c) && !c.allowed->one[3] && !c.allowed->zero_stride[3] && c.n_k > 40 &&
                   c.n_q > 0 && c.batch > 0;
          },
          [](Problem& p) { p.mask.allowed = {}; }),
      in_problem(
          "drops the bias",
          [](const Case& c) {
            return c.bias && !c.packed && !c.causal && !c.window_left && !c.window_right && c.key_lengths.empty() &&
                   !c.allowed && ordinary(c) && !c.bias->one[3] && !c.bias->zero_stride[3] && c.n_k > 40 && c.n_q > 0 &&
                   c.batch > 0;
          },
          [](Problem& p) { p.mask.bias = {}; }),
      in_problem(
          "drops the key lengths",
          [](const Case& c) {
            return !c.key_lengths.empty() && !c.packed && !c.causal && !c.window_left && !c.window_right && !c.bias &&
                   !c.allowed && ordinary(c) && c.n_k > 40 && c.n_q > 0 && c.key_lengths[0] < c.n_k - 8;
          },
          [](Problem& p) { p.mask.key_lengths = {}; }),
      in_problem(
          "takes the default scale",
          [](const Case& c) { return plain(c) && c.scale && *c.scale * std::sqrt(double(c.d)) < 0.8; },
          [](Problem& p) { p.scale.reset(); }),
      in_problem(
          "lets each head choose",
          [](const Case& c) {
            return sees_all(c) && ordinary(c) && c.choice == Choice::shared && c.grouping == Grouping::consecutive &&
                   c.n_q >= 4 && c.n_k >= 16;
          },
          [](Problem& p) { p.choice = Choice::each_head; }),
      in_problem(
          "drops the rest", [](const Case& c) { return prunes(c) && c.rest == Rest::mean; },
          [](Problem& p) { p.rest = Rest::drop; }),
      in_problem(
          "gives rest where there is none",
          [](const Case& c) { return plain(c) && c.rest == Rest::mean && c.pattern.is_dense(); },
          [](Problem& p) {
            if (p.rest == Rest::drop) return;  // the selection is probed with that
            p.pattern = {1, 2};
            p.grouping = Grouping::consecutive;
          }),
      after_forward(
          "errs in the mean", [](const Case& c) { return prunes(c) && c.rest == Rest::mean && c.dtype == DType::f32; },
          spoil_mean),
      after_forward(
          "errs by 1e-3", [](const Case& c) { return plain(c) && c.dtype == DType::f32; },
          [](const ForwardArgs& a) {
            const std::int64_t at = last_offset(a.out);
            core::store_element(a.out.data, a.out.dtype, at, 1e-3 + core::load_element(a.out.data, a.out.dtype, at));
          }),
      after_forward(
          "errs in a 16-bit result", [](const Case& c) { return plain(c) && c.dtype == DType::bf16; },
          [](const ForwardArgs& a) {
            const std::int64_t at = last_offset(a.out);
            const double value = core::load_element(a.out.data, a.out.dtype, at);
            core::store_element(a.out.data, a.out.dtype, at, value + 0.1);
          }),
      after_forward(
          "errs in the LSE", [](const Case& c) { return plain(c) && c.want_lse && forward_only(c); },
          [](const ForwardArgs& a) {
            if (a.lse.present()) multiply_last(a.lse, 1.05);
          }),
      after_forward(
          "leaves an element unwritten", [](const Case& c) { return plain(c); },
          [](const ForwardArgs& a) {
            const std::size_t size = size_bytes(a.out.dtype);
            auto* last = static_cast<unsigned char*>(a.out.data) + static_cast<std::size_t>(last_offset(a.out)) * size;
            for (std::size_t i = 0; i < size; ++i) last[i] = 0xff;
          }),
      after_forward(
          "writes past the end", [](const Case& c) { return plain(c); },
          [](const ForwardArgs& a) { core::store_element(a.out.data, a.out.dtype, last_offset(a.out) + 1, 0); }),
      after_forward(
          "gives NaN on an empty row",
          [](const Case& c) {
            return unmasked_by_tensors(c) && c.causal && c.alignment == Alignment::bottom_right && c.n_k > 0 &&
                   c.n_q > c.n_k;
          },
          [](const ForwardArgs& a) {
            core::store_element(a.out.data, a.out.dtype, 0, std::numeric_limits<double>::quiet_NaN());
          }),
      after_forward(
          "leaves the rows of no sequence alone", [](const Case& c) { return c.tail_q > 0 && c.batch > 0; },
          [](const ForwardArgs& a) { multiply_last(a.out, std::numeric_limits<double>::quiet_NaN()); }),
      in_problem(
          "reads lengths as if they were contiguous",
          [](const Case& c) { return c.cu_stride > 1 && c.cu_q.back() > 0; },
          [](Problem& p) { p.packed->cu_q.stride[0] = 1; }),
      in_problem(
          "takes the lowest bias for a mask",
          [](const Case& c) {
            return c.lowest_bias && c.dtype == DType::f32 && c.n_k > 20 && c.n_q > 0 && c.batch > 0;
          },
          [](Problem& p) { p.mask.bias = {}; }),
      after_backward(
          "swallows NaN", [](const Case& c) { return c.nan_in_q && c.pass == Pass::backward && sees_all(c); },
          [](const BackwardArgs& a) {
            for (std::int64_t at = 0; at <= last_offset(a.d_v); ++at) {
              if (std::isnan(core::load_element(a.d_v.data, a.d_v.dtype, at))) {
                core::store_element(a.d_v.data, a.d_v.dtype, at, 0.0);
              }
            }
          }),
      after_forward(
          "depends on the number of threads", [](const Case& c) { return plain(c) && forward_only(c); },
          [](const ForwardArgs& a) {
            if (a.run.threads == 5) multiply_last(a.out, 1 + 2 * core::epsilon_of(a.out.dtype));
          }),
      in_backward_problem(
          "selects otherwise in backward", [](const Case& c) { return prunes(c) && c.pass == Pass::backward; },
          [](Problem& p) { p.pattern = Pattern::dense(); }),
      in_backward_problem(
          "drops the causal mask in backward",
          [](const Case& c) {
            return unmasked_by_tensors(c) && c.pass == Pass::backward && c.causal && c.n_q > 3 && c.n_k >= c.n_q;
          },
          [](Problem& p) { p.mask.causal = false; }),
      after_backward(
          "forgets the scale of dQ", [](const Case& c) { return plain(c) && c.pass == Pass::backward; },
          [](const BackwardArgs& a) {
            const double factor = std::sqrt(static_cast<double>(a.problem.q.extent(3))) + 1;
            for (std::int64_t c = 0; c < a.d_q.extent(3); ++c) {
              const double value = core::load_element(a.d_q.data, a.d_q.dtype, c);
              core::store_element(a.d_q.data, a.d_q.dtype, c, value * factor);
            }
          }),
      after_backward(
          "loses a part of dV",
          [](const Case& c) { return plain(c) && c.pass == Pass::backward && c.dtype == DType::f32; },
          [](const BackwardArgs& a) { multiply_last(a.d_v, 0.98); }),
      after_backward(
          "writes before dK", [](const Case& c) { return plain(c) && c.pass == Pass::backward; },
          [](const BackwardArgs& a) { core::store_element(a.d_k.data, a.d_k.dtype, -1, 1.0); }),
  };
}

TEST(Check, BesideTheCpuKernelAnErrorShows) {
  CheckOptions options;
  options.limits = small_problems();
  options.beside_cpu = true;
  const Runner good = library_runner(core::host_memory(), "", "");
  Runner bad = good;
  bad.forward = [&](const ForwardArgs& args) {
    good.forward(args);
    const std::int64_t at = last_offset(args.out);
    const double value = core::load_element(args.out.data, args.out.dtype, at);
    core::store_element(args.out.data, args.out.dtype, at, value + 0.1);
  };
  int checked = 0;
  for (std::int64_t index = 0; checked < 20; ++index) {
    const Case drawn = draw_case(31, index, options.limits);
    if (!plain(drawn) || !forward_only(drawn) || drawn.dtype == DType::f32) continue;
    ++checked;
    const CaseReport right = check_drawn(drawn, good, options);
    EXPECT_TRUE(right.passed()) << text_of(right);
    EXPECT_GT(right.rows_beside_cpu, 0);
    const CaseReport wrong = check_drawn(drawn, bad, options);
    const bool told = std::any_of(wrong.failures.begin(), wrong.failures.end(), [](const std::string& failure) {
      return failure.find("beside the CPU's") != std::string::npos;
    });
    // The spoilt element also makes its key look kept where a probe ends in it; then the row is not compared.
    EXPECT_TRUE(told || right.rows_beside_cpu > wrong.rows_beside_cpu) << text_of(wrong);
  }
}

void expect_flagged(const std::vector<Fault>& all) {
  constexpr int kCases = 2;
  const Runner good = library_runner(core::host_memory(), "cpu_reference", "cpu_reference");
  CheckOptions options;
  options.limits = small_problems();
  for (const Fault& fault : all) {
    SCOPED_TRACE(fault.name);
    const Runner bad = fault.inject(good);
    int found = 0;
    for (std::int64_t index = 0; index < 20000 && found < kCases; ++index) {
      const Case drawn = draw_case(99, index, options.limits);
      if (!fault.shows(drawn)) continue;
      ++found;
      EXPECT_TRUE(check_drawn(drawn, good, options).passed()) << describe(drawn);
      EXPECT_FALSE(check_drawn(drawn, bad, options).passed()) << describe(drawn);
    }
    EXPECT_EQ(found, kCases);
  }
}

TEST(Check, EveryFaultIsFlagged) { expect_flagged(faults()); }
TEST(Check, EveryFaultOfTrainingIsFlagged) { expect_flagged(training_faults()); }

TEST(Check, AThrowingKernelIsAFailureNotACrash) {
  Runner bad;
  bad.forward = [](const ForwardArgs&) { throw Error("out of luck"); };
  const CaseReport report = check_drawn(draw_case(1, 1, small_problems()), bad);
  ASSERT_EQ(report.failures.size(), 1u);
  EXPECT_NE(report.failures[0].find("out of luck"), std::string::npos);
}

}  // namespace
}  // namespace dspattn::check
