#include "apps/bench_cell.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <vector>

#include "apps/device_tensor.h"
#include "core/half.h"
#include "dspattn/workspace.h"

namespace dspattn::apps {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

DeviceTensor random_tensor(Device device, DType dtype, const std::vector<std::int64_t>& shape, unsigned seed) {
  DeviceTensor tensor(device, dtype, shape);
  std::vector<std::byte> host(tensor.bytes());
  std::minstd_rand random(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < std::ssize(host) / static_cast<std::int64_t>(size_bytes(dtype)); ++i) {
    core::store_element(host.data(), dtype, i, normal(random));
  }
  tensor.upload(host.data());
  return tensor;
}

// The tensors of a cell; one set serves both patterns.
struct Tensors {
  explicit Tensors(const CellShape& s)
      : q(random_tensor(s.device, s.dtype, {s.batch, s.heads, s.n_q, s.d}, 1)),
        k(random_tensor(s.device, s.dtype, {s.batch, s.kv_heads, s.n_k, s.d}, 2)),
        v(random_tensor(s.device, s.dtype, {s.batch, s.kv_heads, s.n_k, s.d}, 3)),
        out(s.device, s.dtype, {s.batch, s.heads, s.n_q, s.d}),
        lse(s.device, DType::f32, {s.batch, s.heads, s.n_q}) {
    if (s.pass == Pass::backward) {
      d_out = random_tensor(s.device, s.dtype, {s.batch, s.heads, s.n_q, s.d}, 4);
      d_q = DeviceTensor(s.device, s.dtype, {s.batch, s.heads, s.n_q, s.d});
      d_k = DeviceTensor(s.device, s.dtype, {s.batch, s.kv_heads, s.n_k, s.d});
      d_v = DeviceTensor(s.device, s.dtype, {s.batch, s.kv_heads, s.n_k, s.d});
    }
  }
  DeviceTensor q, k, v, out, lse, d_out, d_q, d_k, d_v;
};

Problem problem_of(const CellShape& shape, const Tensors& tensors, Pattern pattern) {
  Problem problem;
  problem.device = shape.device;
  problem.q = tensors.q.view();
  problem.k = tensors.k.view();
  problem.v = tensors.v.view();
  problem.pattern = pattern;
  problem.grouping = shape.grouping;
  problem.rest = pattern.is_dense() ? Rest::drop : shape.rest;
  problem.mask.causal = shape.causal;
  return problem;
}

bool is_served(const Problem& problem, Pass pass) {
  return std::ranges::any_of(consider(problem, pass), [](const Verdict& verdict) { return verdict.reasons.empty(); });
}

// One of the calls that are timed in turn.
class Call {
 public:
  Call(const CellShape& shape, const Tensors& tensors, Pattern pattern, const std::string& kernel, int threads)
      : shape_(shape), tensors_(tensors) {
    const Problem problem = problem_of(shape, tensors, pattern);
    timing_.kernel = choose(problem, shape.pass, kernel).name;
    forward_.problem = problem;
    forward_.out = tensors.out.view();
    forward_.lse = tensors.lse.view();
    forward_.run.threads = threads;
    // A kernel forced for the backward pass has no forward of that name.
    if (shape.pass == Pass::forward) forward_.run.kernel = kernel;
    forward_space_.attach(forward_);
    if (shape.pass == Pass::backward) {
      backward_.problem = problem;
      backward_.out = tensors.out.view();
      backward_.lse = tensors.lse.view();
      backward_.d_out = tensors.d_out.view();
      backward_.d_q = tensors.d_q.view();
      backward_.d_k = tensors.d_k.view();
      backward_.d_v = tensors.d_v.view();
      backward_.run.threads = threads;
      backward_.run.kernel = kernel;
      backward_space_.attach(backward_);
    }
  }

  // The outputs are shared with the other call, so a backward call needs its own forward's results back first.
  void prepare() {
    forward(forward_);
    wait();
  }

  void warm_up() {
    prepare();
    const Clock::time_point start = Clock::now();
    launch();
    wait();
    // At least this long a sample, so that neither the clock nor a GPU's launch latency counts.
    constexpr double kSampleSeconds = 2e-3;
    repeats_ = std::clamp(static_cast<int>(kSampleSeconds / std::max(seconds_since(start), 1e-7)), 1, 1000);
  }

  void sample() {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < repeats_; ++i) launch();
    wait();
    samples_us_.push_back(seconds_since(start) * 1e6 / repeats_);
    spent_ += samples_us_.back() * 1e-6 * repeats_;
  }

  bool enough(double seconds) const {
    constexpr std::size_t kFewest = 5;
    constexpr std::size_t kMost = 200;
    return samples_us_.size() >= kMost || (samples_us_.size() >= kFewest && spent_ >= seconds);
  }

  Timing result() {
    std::sort(samples_us_.begin(), samples_us_.end());
    const auto at = [&](double part) {
      return samples_us_[static_cast<std::size_t>(std::lround(part * static_cast<double>(samples_us_.size() - 1)))];
    };
    timing_.median_us = at(0.5);
    timing_.spread_us = at(0.9) - at(0.1);
    const double flop = 4.0 * static_cast<double>(shape_.batch * shape_.heads) * static_cast<double>(shape_.n_q) *
                        static_cast<double>(shape_.n_k * shape_.d) * (shape_.causal ? 0.5 : 1.0) *
                        (shape_.pass == Pass::backward ? 2.5 : 1.0);
    timing_.tflops = timing_.median_us > 0 ? flop / timing_.median_us * 1e-6 : 0;
    return timing_;
  }

 private:
  void launch() { shape_.pass == Pass::forward ? forward(forward_) : backward(backward_); }

  // Copying from a device waits for it.
  void wait() {
    if (shape_.device.type == DeviceType::cpu || tensors_.lse.bytes() == 0) return;
    float first = 0;
    api::memory_of(shape_.device).copy_out(&first, tensors_.lse.view().data, sizeof first);
  }

  const CellShape& shape_;
  const Tensors& tensors_;
  ForwardArgs forward_;
  BackwardArgs backward_;
  Workspace forward_space_, backward_space_;
  int repeats_ = 1;
  double spent_ = 0;
  std::vector<double> samples_us_;
  Timing timing_;
};

}  // namespace

CellResult time_cell(const CellShape& shape, const CellOptions& options) {
  const Tensors tensors(shape);
  Call ours(shape, tensors, shape.pattern, options.kernel, options.threads);
  std::optional<Call> dense;
  const Problem full = problem_of(shape, tensors, Pattern::dense());
  if (!shape.pattern.is_dense() && is_served(full, Pass::forward) && is_served(full, shape.pass)) {
    dense.emplace(shape, tensors, Pattern::dense(), "", options.threads);
  }

  ours.warm_up();
  if (dense) dense->warm_up();
  while (!ours.enough(options.seconds) || (dense && !dense->enough(options.seconds))) {
    if (shape.pass == Pass::backward) ours.prepare();
    ours.sample();
    if (dense) {
      if (shape.pass == Pass::backward) dense->prepare();
      dense->sample();
    }
  }
  CellResult result{ours.result(), std::nullopt};
  if (dense) result.dense = dense->result();
  return result;
}

}  // namespace dspattn::apps
