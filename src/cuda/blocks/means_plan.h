// rest = mean on the host: which means of V a problem needs, and what the kernels that write and read them are told.
#pragma once

#include <cstddef>

#include "cuda/blocks/means_params.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::blocks {

// `left`, `right`: the band that rows see, as the kernel is told of it. `columns`: floats of an entry. `begin`: bytes
// of the workspace that are taken. `first_by_product`: of MeanQuestion.
MeansPlan plan_means(const Problem& problem, int left, int right, int columns, std::size_t begin,
                     bool first_by_product = false);

MeansView means_view_of(const MeansPlan& plan, const Problem& problem, const void* workspace);

// `work`: as the kernel that reads them is told of it.
MeansParams means_params_of(const MeansPlan& plan, const Problem& problem, const WorkParams& work, void* workspace);

}  // namespace dspattn::cuda::blocks
