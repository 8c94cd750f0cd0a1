// Joins the results of attention over parts of the keys.
//
// Pruning is local to groups, so where every part starts at a multiple of the group's reach (128 keys interleaved, M
// consecutive), the parts together kept what one pass over all keys keeps, and their outputs merge exactly by LSE:
//
//   lse = log sum_p exp(lse_p),   out = sum_p exp(lse_p - lse) out_p
//
//   args.problem.mask.alignment = dspattn::Alignment::top_left;
//   args.problem.mask.offset = first_query - first_key;      // where query 0 stands among this part's keys
//   ...                                                       // one forward per part, out in fp32
//   dspattn::merge(parts, out, lse);
//
// In host memory. LSEs are fp32: a row whose |LSE| exceeds 8192 merges no more precisely than 2^-11.
#pragma once

#include <span>

#include "dspattn/error.h"
#include "dspattn/tensor_view.h"

namespace dspattn {

struct Partial {
  ConstTensorView out;  // fp32, fp16 or bf16 [batch, heads, n_q, d_v]; fp32 loses nothing
  ConstTensorView lse;  // fp32 [batch, heads, n_q]
};

// Sums in fp32, in the order given. A row that no part has a key for gives 0 and -inf; NaN in a part's LSE makes the
// row NaN. `out` (fp32, fp16 or bf16) and `lse` may be those of a part, and `lse` may be left out. Throws Error.
void merge(std::span<const Partial> parts, const TensorView& out, const TensorView& lse = {});

}  // namespace dspattn
