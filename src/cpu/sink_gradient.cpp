#include "cpu/sink_gradient.h"

#include <cmath>
#include <cstdint>

#include "core/half.h"
#include "cpu/backward_job.h"
#include "cpu/parallel.h"

namespace dspattn::cpu {
namespace {

double row_product(const BackwardJob& run, std::int64_t batch, std::int64_t head, std::int64_t row) {
  const unsigned char* out = run.out.at(batch, head, row);
  const unsigned char* d_out = run.d_out.at(batch, head, row);
  double sum = 0;
  for (std::int64_t c = 0; c < run.job.g.d_v; ++c) {
    sum += core::load_element(out, run.out.dtype, c) * core::load_element(d_out, run.d_out.dtype, c);
  }
  return sum;
}

}  // namespace

void sink_gradient(const BackwardArgs& args) {
  const BackwardJob run(args);
  // A head's rows are added by one thread in order: the same bits for any number of threads.
  parallel_for(run.job.g.heads, args.run, [&](std::int64_t head) {
    const double sink = run.job.sink(head);
    double sum = 0;
    for (std::int64_t b = 0; b < run.job.g.batch; ++b) {
      const SequenceSpan sequence = run.job.sequence(b);
      for (std::int64_t row = sequence.q_begin; row < sequence.q_begin + sequence.n_q; ++row) {
        const double lse = run.lse_at(sequence.batch, head, row);
        if (std::isinf(lse) && std::isinf(sink)) continue;  // a row without a key and without a sink
        const double d_lse = run.d_lse_at(sequence.batch, head, row);
        sum += std::exp(sink - lse) * (d_lse - row_product(run, sequence.batch, head, row));
      }
    }
    static_cast<float*>(args.d_sinks.data)[head * args.d_sinks.step(0)] = static_cast<float>(sum);
  });
}

}  // namespace dspattn::cpu
