// A valid call, and the ways to make it a wrong one: each with what its error must say.
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "dspattn/attention.h"

namespace dspattn {

inline constexpr std::int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kQueries = 3, kKeys = 5, kDim = 8, kDimV = 6;
inline constexpr float kUntouched = -77.0f;
inline constexpr std::size_t kRoom = 4096;  // elements of every buffer, more than any wrong shape below would need

// A valid call, forward and backward, that a test case breaks in one place.
struct Call {
  std::vector<float> q = std::vector<float>(kRoom, 1.0f), k = q, v = q, forward_out = q, forward_lse = q, d_out = q;
  std::vector<float> out = std::vector<float>(kRoom, kUntouched), lse = out, d_q = out, d_k = out, d_v = out;
  std::vector<float> bias = std::vector<float>(kRoom, 0.0f);
  std::vector<unsigned char> allowed = std::vector<unsigned char>(kRoom, 1);
  std::vector<std::int32_t> key_lengths{5, 0};
  std::vector<std::int32_t> cu_q{0, 1, 3}, cu_k{0, 5, 5};
  alignas(256) unsigned char workspace[1024] = {};
  ForwardArgs forward;
  BackwardArgs backward;

  Call() {
    Problem problem;
    problem.q = {q.data(), DType::f32, {kBatch, kHeads, kQueries, kDim}};
    problem.k = {k.data(), DType::f32, {kBatch, kKvHeads, kKeys, kDim}};
    problem.v = {v.data(), DType::f32, {kBatch, kKvHeads, kKeys, kDimV}};
    problem.mask.key_lengths = {key_lengths.data(), DType::i32, {kBatch}};
    problem.mask.allowed = {allowed.data(), DType::b8, {1, kHeads, kQueries, kKeys}};
    problem.mask.bias = {bias.data(), DType::f32, {kBatch, 1, 1, kKeys}};
    set_problem(problem);
    forward.out = {out.data(), DType::f32, {kBatch, kHeads, kQueries, kDimV}};
    forward.lse = {lse.data(), DType::f32, {kBatch, kHeads, kQueries}};
    backward.out = {forward_out.data(), DType::f32, {kBatch, kHeads, kQueries, kDimV}};
    backward.lse = {forward_lse.data(), DType::f32, {kBatch, kHeads, kQueries}};
    backward.d_out = {d_out.data(), DType::f32, {kBatch, kHeads, kQueries, kDimV}};
    backward.d_q = {d_q.data(), DType::f32, {kBatch, kHeads, kQueries, kDim}};
    backward.d_k = {d_k.data(), DType::f32, {kBatch, kKvHeads, kKeys, kDim}};
    backward.d_v = {d_v.data(), DType::f32, {kBatch, kKvHeads, kKeys, kDimV}};
  }

  void set_problem(const Problem& problem) { forward.problem = backward.problem = problem; }

  void make_packed() {
    Problem problem = forward.problem;
    problem.mask.key_lengths = {};
    problem.mask.allowed = {};
    problem.mask.bias = {};
    problem.q = {q.data(), DType::f32, {1, kHeads, 3, kDim}};
    problem.k = {k.data(), DType::f32, {1, kKvHeads, 5, kDim}};
    problem.v = {v.data(), DType::f32, {1, kKvHeads, 5, kDimV}};
    problem.packed = Packed{{cu_q.data(), DType::i32, {3}}, {cu_k.data(), DType::i32, {3}}, 2, 5};
    set_problem(problem);
    for (ConstTensorView* view : {&backward.out, &backward.lse, &backward.d_out}) view->shape[0] = 1;
    for (TensorView* view : {&forward.out, &forward.lse, &backward.d_q, &backward.d_k, &backward.d_v}) {
      view->shape[0] = 1;
    }
  }

  bool outputs_untouched() const {
    for (const std::vector<float>* memory : {&out, &lse, &d_q, &d_k, &d_v}) {
      for (const float value : *memory) {
        if (value != kUntouched) return false;
      }
    }
    return true;
  }
};

struct WrongCall {
  const char* name;
  std::function<void(Call&)> make_wrong;
  std::vector<const char*> words;  // argument, expectation and value: all in one reason
  enum Passes { both, only_forward, only_backward } passes = both;
};

// A case that breaks the problem, shared by forward and backward.
inline WrongCall wrong_problem(const char* name, std::function<void(Problem&)> change, std::vector<const char*> words) {
  return {name,
          [change](Call& call) {
            change(call.forward.problem);
            change(call.backward.problem);
          },
          std::move(words)};
}

inline WrongCall wrong_packed(const char* name, std::function<void(Call&, Problem&)> change,
                              std::vector<const char*> words) {
  return {name,
          [change](Call& call) {
            call.make_packed();
            change(call, call.forward.problem);
            change(call, call.backward.problem);
          },
          std::move(words)};
}

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInf = std::numeric_limits<double>::infinity();

inline std::vector<WrongCall> wrong_calls() {
  return {
      wrong_problem("a mean beside masks by query", [](Problem& p) { p.rest = Rest::mean; },
                    {"mask.allowed.shape[2]:", "1 with rest = mean", "got 3"}),
      wrong_problem("a type that there is not", [](Problem& p) { p.q.dtype = static_cast<DType>(77); },
                    {"q.dtype:", "one of DType's", "got number 77"}),
      wrong_problem("a device that there is not", [](Problem& p) { p.device.type = static_cast<DeviceType>(9); },
                    {"device.type:", "cpu or cuda", "got number 9"}),
      wrong_problem("a grouping that there is not", [](Problem& p) { p.grouping = static_cast<Grouping>(9); },
                    {"grouping:", "consecutive or interleaved", "got number 9"}),
      wrong_problem("an alignment that there is not", [](Problem& p) { p.mask.alignment = static_cast<Alignment>(9); },
                    {"mask.alignment:", "bottom_right or top_left", "got number 9"}),
      wrong_problem("a rest that there is not", [](Problem& p) { p.rest = static_cast<Rest>(9); },
                    {"rest:", "drop or mean", "got number 9"}),
      wrong_problem("products of fp32 that there are not",
                    [](Problem& p) { p.fp32_products = static_cast<Fp32Products>(9); },
                    {"fp32_products:", "tf32_allowed or full", "got number 9"}),
      wrong_problem("a choice that there is not", [](Problem& p) { p.choice = static_cast<Choice>(9); },
                    {"choice:", "each_head or shared", "got number 9"}),
      wrong_problem("dropout of everything", [](Problem& p) { p.dropout.probability = 1; },
                    {"dropout.probability:", "below 1", "got 1"}),
      wrong_problem("dropout of NaN", [](Problem& p) { p.dropout.probability = kNaN; },
                    {"dropout.probability:", "below 1", "got nan"}),
      wrong_problem("a dropout state of lengths",
                    [](Problem& p) {
                      p.dropout.state = {p.mask.key_lengths.data, DType::i32, {2}};
                    },
                    {"dropout.state.shape[0]:", "4", "got 2"}),
      wrong_problem("a soft cap of 0", [](Problem& p) { p.soft_cap = 0.0; }, {"soft_cap:", "positive", "got 0"}),
      wrong_problem("sinks of other heads",
                    [](Problem& p) {
                      p.sinks = {p.mask.bias.data, DType::f32, {3}};
                    },
                    {"sinks.shape[0]:", "heads = 4", "got 3"}),
      wrong_problem("sinks in another type",
                    [](Problem& p) {
                      p.sinks = {p.mask.bias.data, DType::f16, {4}};
                    },
                    {"sinks.dtype:", "fp32", "got fp16"}),
      wrong_problem("pages of five keys",
                    [](Problem& p) {
                      p.block_table = {p.mask.key_lengths.data, DType::i32, {2, 1}};
                    },
                    {"k.shape[2]:", "multiple of 16", "got 5"}),
      wrong_problem("a block table of other batches",
                    [](Problem& p) {
                      p.block_table = {p.mask.key_lengths.data, DType::i32, {1, 1}};
                    },
                    {"block_table.shape[0]:", "q's batch = 2", "got 1"}),
      {"gradients of a mean",
       [](Call& call) {
         call.backward.problem.mask.allowed = {};
         call.backward.problem.rest = Rest::mean;
       },
       {"rest:", "drop for gradients", "got mean"},
       WrongCall::only_backward},
      {"a gradient of no bias",
       [](Call& call) {
         call.backward.problem.mask.bias = {};
         call.backward.d_bias = {call.d_v.data(), DType::f32, {kBatch, 1, 1, kKeys}};
       },
       {"d_bias:", "none without a bias", "got one"},
       WrongCall::only_backward},
      {"a gradient of a bias in another shape",
       [](Call& call) {
         call.backward.d_bias = {call.out.data(), DType::f32, {kBatch, 1, 3, kKeys}};
       },
       {"d_bias.shape:", "mask.bias.shape = [2, 1, 1, 5]", "got [2, 1, 3, 5]"},
       WrongCall::only_backward},
      {"a gradient of no sinks",
       [](Call& call) {
         call.backward.d_sinks = {call.out.data(), DType::f32, {kHeads}};
       },
       {"d_sinks:", "none without sinks", "got one"},
       WrongCall::only_backward},
      wrong_problem("q left out", [](Problem& p) { p.q = {}; }, {"q:", "rank 4 [batch, heads, n_q, d]", "rank 0"}),
      wrong_problem("k of rank 3", [](Problem& p) { p.k.rank = 3; }, {"k:", "rank 4", "rank 3 [2, 2, 5]"}),
      wrong_problem("negative extent", [](Problem& p) { p.q.shape[2] = -3; }, {"q.shape[2]:", ">= 0", "got -3"}),
      wrong_problem("batches differ", [](Problem& p) { p.k.shape[0] = 3; }, {"k.shape[0]:", "q's batch = 2", "got 3"}),
      wrong_problem("v has other kv_heads", [](Problem& p) { p.v.shape[1] = 1; },
                    {"v.shape[1]:", "k's kv_heads = 2", "got 1"}),
      wrong_problem("v has another length", [](Problem& p) { p.v.shape[2] = 6; },
                    {"v.shape[2]:", "k's n_k = 5", "got 6"}),
      wrong_problem("k has another d", [](Problem& p) { p.k.shape[3] = 7; }, {"k.shape[3]:", "q's d = 8", "got 7"}),
      wrong_problem("heads not divisible", [](Problem& p) { p.k.shape[1] = p.v.shape[1] = 3; },
                    {"q.shape[1]:", "multiple of k's kv_heads = 3", "got 4"}),
      wrong_problem("no kv_heads", [](Problem& p) { p.k.shape[1] = p.v.shape[1] = 0; },
                    {"q.shape[1]:", "multiple of k's kv_heads = 0", "got 4"}),
      wrong_problem("d = 513", [](Problem& p) { p.q.shape[3] = p.k.shape[3] = 513; },
                    {"q.shape[3]:", "from 1 to 512", "got 513"}),
      wrong_problem("d = 0", [](Problem& p) { p.q.shape[3] = p.k.shape[3] = 0; },
                    {"q.shape[3]:", "from 1 to 512", "got 0"}),
      wrong_problem("d_v = 600", [](Problem& p) { p.v.shape[3] = 600; }, {"v.shape[3]:", "from 1 to 512", "got 600"}),
      wrong_problem("last dimension strided", [](Problem& p) { p.k.stride[3] = 2; }, {"k.stride[3]:", "1", "got 2"}),
      wrong_problem("negative stride", [](Problem& p) { p.v.stride[2] = -6; }, {"v.stride[2]:", ">= 0", "got -6"}),
      wrong_problem("size overflows", [](Problem& p) { p.q.stride[0] = std::numeric_limits<std::int64_t>::max() / 2; },
                    {"q:", "fits in 63 bits", "[4611686018427387903, 24, 8, 1]"}),
      wrong_problem("element count overflows",
                    [](Problem& p) {
                      p.q.shape[0] = p.q.shape[1] = std::int64_t{1} << 40;
                      p.q.stride[0] = p.q.stride[1] = 0;
                    },
                    {"q:", "fits in 63 bits", "1099511627776"}),
      wrong_problem("integer q", [](Problem& p) { p.q.dtype = DType::i32; },
                    {"q.dtype:", "fp32, fp16 or bf16", "int32"}),
      wrong_problem("v of another type", [](Problem& p) { p.v.dtype = DType::bf16; },
                    {"v.dtype:", "q's type fp32", "got bf16"}),
      wrong_problem("null k", [](Problem& p) { p.k.data = nullptr; }, {"k.data:", "shape [2, 2, 5, 8]", "null"}),
      wrong_problem("misaligned q", [](Problem& p) { p.q.data = static_cast<const char*>(p.q.data) + 1; },
                    {"q.data:", "aligned to 4 bytes", "0x"}),
      wrong_problem("pattern 3:2",
                    [](Problem& p) {
                      p.pattern = {3, 2};
                    },
                    {"pattern:", "1 <= N <= M <= 32", "got 3:2"}),
      wrong_problem("pattern 0:4",
                    [](Problem& p) {
                      p.pattern = {0, 4};
                    },
                    {"pattern:", "1 <= N", "got 0:4"}),
      wrong_problem("pattern 1:33",
                    [](Problem& p) {
                      p.pattern = {1, 33};
                    },
                    {"pattern:", "M <= 32", "got 1:33"}),
      wrong_problem("interleaved 3:5",
                    [](Problem& p) {
                      p.pattern = {3, 5};
                    },
                    {"pattern:", "divides 128", "got 3:5"}),
      wrong_problem("NaN scale", [](Problem& p) { p.scale = kNaN; }, {"scale:", "finite, positive", "nan"}),
      wrong_problem("infinite scale", [](Problem& p) { p.scale = kInf; }, {"scale:", "finite, positive", "inf"}),
      wrong_problem("zero scale", [](Problem& p) { p.scale = 0.0; }, {"scale:", "finite, positive", "got 0"}),
      wrong_problem("negative scale", [](Problem& p) { p.scale = -0.5; }, {"scale:", "finite, positive", "got -0.5"}),
      wrong_problem("scale below the served ones", [](Problem& p) { p.scale = 0x1.fp-127; },
                    {"scale:", "2^-126 to 2^126", "got 1.1"}),
      wrong_problem("scale above the served ones", [](Problem& p) { p.scale = 2.5e38; },
                    {"scale:", "2^-126 to 2^126", "got 2.5e+38"}),
      wrong_problem("negative left window", [](Problem& p) { p.mask.window_left = -1; },
                    {"mask.window_left:", ">= 0", "got -1"}),
      wrong_problem("negative right window", [](Problem& p) { p.mask.window_right = -9; },
                    {"mask.window_right:", ">= 0", "got -9"}),
      wrong_problem("offset out of reach", [](Problem& p) { p.mask.offset = -(std::int64_t{1} << 39) - 1; },
                    {"mask.offset:", "from -2^39 to 2^39", "got -549755813889"}),
      wrong_problem("key lengths of another batch", [](Problem& p) { p.mask.key_lengths.shape[0] = 1; },
                    {"mask.key_lengths.shape[0]:", "batch = 2", "got 1"}),
      wrong_problem("key lengths of another type", [](Problem& p) { p.mask.key_lengths.dtype = DType::f32; },
                    {"mask.key_lengths.dtype:", "int32", "got fp32"}),
      {"key length past the keys",
       [](Call& c) { c.key_lengths[1] = 6; },
       {"mask.key_lengths[1]:", "0 to", "5", "got 6"}},
      {"negative key length", [](Call& c) { c.key_lengths[0] = -1; }, {"mask.key_lengths[0]:", "from 0", "got -1"}},
      wrong_problem("boolean mask of another type", [](Problem& p) { p.mask.allowed.dtype = DType::f32; },
                    {"mask.allowed.dtype:", "bool", "got fp32"}),
      wrong_problem("boolean mask does not broadcast", [](Problem& p) { p.mask.allowed.shape[1] = 2; },
                    {"mask.allowed.shape[1]:", "1 or heads = 4", "got 2"}),
      wrong_problem("bias does not broadcast", [](Problem& p) { p.mask.bias.shape[3] = 4; },
                    {"mask.bias.shape[3]:", "1 or n_k = 5", "got 4"}),
      wrong_problem("bias of rank 2", [](Problem& p) { p.mask.bias.rank = 2; }, {"mask.bias:", "rank 4", "rank 2"}),
      wrong_problem("bias without a rank", [](Problem& p) { p.mask.bias.rank = 0; },
                    {"mask.bias:", "rank 4", "rank 0"}),
      wrong_problem("bias of another type", [](Problem& p) { p.mask.bias.dtype = DType::f16; },
                    {"mask.bias.dtype:", "fp32 or q's type fp32", "got fp16"}),
      wrong_problem("null bias", [](Problem& p) { p.mask.bias.data = nullptr; },
                    {"mask.bias.data:", "address", "null"}),
      wrong_problem("second CPU", [](Problem& p) { p.device.index = 1; }, {"device.index:", "0 for the CPU", "got 1"}),

      wrong_packed("packed with a batch of 2", [](Call&, Problem& p) { p.q.shape[0] = 2; },
                   {"q.shape[0]:", "1 for a packed batch", "got 2"}),
      wrong_packed("cumulative lengths start at 1", [](Call& c, Problem&) { c.cu_q[0] = 1; },
                   {"packed.cu_q[0]:", "expected 0", "got 1"}),
      wrong_packed("cumulative lengths decrease", [](Call& c, Problem&) { c.cu_k[2] = 4; },
                   {"packed.cu_k[2]:", "at least the value before it, 5", "got 4"}),
      wrong_packed("negative cumulative lengths", [](Call& c, Problem&) { c.cu_k[1] = -10; },
                   {"packed.cu_k[1]:", "at least the value before it, 0", "got -10"}),
      wrong_packed("strided cumulative lengths decrease",
                   [](Call& c, Problem& p) {
                     c.cu_k = {0, 7, 5, 7, 4};
                     p.packed->cu_k = {c.cu_k.data(), DType::i32, {3}, {2}};
                   },
                   {"packed.cu_k[2]:", "at least the value before it, 5", "got 4"}),
      wrong_packed("cumulative lengths pass the end", [](Call& c, Problem&) { c.cu_q[2] = 4; },
                   {"packed.cu_q[2]:", "at most the packed rows 3", "got 4"}),
      wrong_packed("cumulative lengths of another type", [](Call&, Problem& p) { p.packed->cu_q.dtype = DType::f32; },
                   {"packed.cu_q.dtype:", "int32", "got fp32"}),
      wrong_packed("empty cumulative lengths", [](Call&, Problem& p) { p.packed->cu_q.shape[0] = 0; },
                   {"packed.cu_q.shape[0]:", "at least 1", "got 0"}),
      wrong_packed("cu_k of another batch", [](Call&, Problem& p) { p.packed->cu_k.shape[0] = 2; },
                   {"packed.cu_k.shape[0]:", "cu_q's extent 3", "got 2"}),
      wrong_packed("max_q too small", [](Call&, Problem& p) { p.packed->max_q = 1; },
                   {"packed.max_q:", "at least the longest sequence, 2", "got 1"}),
      wrong_packed("negative max_k", [](Call&, Problem& p) { p.packed->max_k = -2; },
                   {"packed.max_k:", ">= 0", "got -2"}),

      {"threads", [](Call& c) { c.forward.run.threads = c.backward.run.threads = -2; }, {"threads:", ">= 0", "got -2"}},
      {"stream on the CPU",
       [](Call& c) { c.forward.run.stream = c.backward.run.stream = c.workspace; },
       {"stream:", "null for CPU", "0x"}},
      {"misaligned workspace",
       [](Call& c) {
         c.forward.run.workspace = c.backward.run.workspace = c.workspace + 64;
         c.forward.run.workspace_bytes = c.backward.run.workspace_bytes = 64;
       },
       {"workspace:", "aligned to 256 bytes", "0x"}},
      {"null workspace",
       [](Call& c) { c.forward.run.workspace_bytes = c.backward.run.workspace_bytes = 64; },
       {"workspace:", "workspace_bytes = 64", "null"}},

      {"workspace beyond 63 bits",
       [](Call& c) {
         c.forward.run.workspace = c.backward.run.workspace = c.workspace;
         c.forward.run.workspace_bytes = c.backward.run.workspace_bytes = std::size_t{1} << 63;
       },
       {"workspace_bytes:", "at most 2^63 - 1", "got 9223372036854775808"}},

      {"out of another shape",
       [](Call& c) { c.forward.out.shape[3] = 8; },
       {"out.shape:", "[batch, heads, n_q, d_v] = [2, 4, 3, 6]", "got [2, 4, 3, 8]"},
       WrongCall::only_forward},
      {"out of another type",
       [](Call& c) { c.forward.out.dtype = DType::bf16; },
       {"out.dtype:", "fp32", "got bf16"},
       WrongCall::only_forward},
      {"bf16 out of fp16 inputs",
       [](Call& c) {
         for (ConstTensorView* view : {&c.forward.problem.q, &c.forward.problem.k, &c.forward.problem.v}) {
           view->dtype = DType::f16;
         }
         c.forward.out.dtype = DType::bf16;
       },
       {"out.dtype:", "fp16 or fp32", "got bf16"},
       WrongCall::only_forward},
      {"out left out", [](Call& c) { c.forward.out = {}; }, {"out:", "rank 4", "rank 0"}, WrongCall::only_forward},
      {"null out",
       [](Call& c) { c.forward.out.data = nullptr; },
       {"out.data:", "[2, 4, 3, 6]", "null"},
       WrongCall::only_forward},
      {"out with stride 0",
       [](Call& c) { c.forward.out.stride[1] = 0; },
       {"out.stride:", "its own place", "[72, 0, 6, 1]"},
       WrongCall::only_forward},
      {"out rows overlap",
       [](Call& c) { c.forward.out.stride[2] = 5; },
       {"out.stride:", "its own place", "[72, 18, 5, 1]"},
       WrongCall::only_forward},
      {"lse of another type",
       [](Call& c) { c.forward.lse.dtype = DType::f16; },
       {"lse.dtype:", "fp32", "got fp16"},
       WrongCall::only_forward},
      {"lse of another shape",
       [](Call& c) { c.forward.lse.shape[2] = 2; },
       {"lse.shape:", "[batch, heads, n_q] = [2, 4, 3]", "got [2, 4, 2]"},
       WrongCall::only_forward},
      {"out is q",
       [](Call& c) { c.forward.out.data = c.q.data(); },
       {"out:", "apart from q", "0x"},
       WrongCall::only_forward},
      {"out overlaps lse",
       [](Call& c) { c.forward.lse.data = c.out.data() + 143; },
       {"out:", "apart from lse", "0x"},
       WrongCall::only_forward},
      {"out overlaps the bias",
       [](Call& c) { c.forward.out.data = c.bias.data() + 9; },
       {"out:", "apart from mask.bias", "0x"},
       WrongCall::only_forward},
      {"workspace overlaps k",
       [](Call& c) {
         c.forward.run.workspace = c.workspace;
         c.forward.run.workspace_bytes = 512;
         c.forward.problem.mask.allowed.data = c.workspace + 500;
       },
       {"workspace:", "apart from mask.allowed", "512 bytes"},
       WrongCall::only_forward},

      {"lse missing in backward",
       [](Call& c) { c.backward.lse = {}; },
       {"lse:", "rank 3", "rank 0"},
       WrongCall::only_backward},
      {"d_out of another shape",
       [](Call& c) { c.backward.d_out.shape[3] = 8; },
       {"d_out.shape:", "= [2, 4, 3, 6]", "got [2, 4, 3, 8]"},
       WrongCall::only_backward},
      {"d_k with q's heads",
       [](Call& c) { c.backward.d_k.shape[1] = 4; },
       {"d_k.shape:", "= [2, 2, 5, 8]", "got [2, 4, 5, 8]"},
       WrongCall::only_backward},
      {"d_q is d_k",
       [](Call& c) { c.backward.d_q.data = c.d_k.data(); },
       {"d_q:", "apart from d_k", "0x"},
       WrongCall::only_backward},
      {"d_v is v",
       [](Call& c) { c.backward.d_v.data = c.v.data(); },
       {"d_v:", "apart from v", "0x"},
       WrongCall::only_backward},
      {"d_v is d_out",
       [](Call& c) { c.backward.d_v.data = c.d_out.data(); },
       {"d_v:", "apart from d_out", "0x"},
       WrongCall::only_backward},
  };
}

}  // namespace dspattn
