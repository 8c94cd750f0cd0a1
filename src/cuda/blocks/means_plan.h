// rest = mean on the host: which means of V a problem needs, and what the kernels that write and read them are told.
#pragma once

#include <cstddef>

#include "cuda/blocks/means_params.h"
#include "dspattn/attention.h"

namespace dspattn::cuda::blocks {

// `left`, `right`: the band that rows see, as the kernel is told of it. `columns`: floats of an entry. `begin`: bytes
// of the workspace that are taken.
MeansPlan plan_means(const Problem& problem, int left, int right, int columns, std::size_t begin);

// Whether a kernel could write the table itself: whole blocks and first keys, of 16-bit rows of V that lie in one
// piece, aligned to 16 bytes, all sequences with the same number of keys.
bool may_own_means(const MeansPlan& plan, const Problem& problem);
// It does.
void own_means(MeansPlan& plan, const Problem& problem);
OwnMeans own_means_of(const MeansPlan& plan, void* workspace);

MeansView means_view_of(const MeansPlan& plan, const Problem& problem, const void* workspace);

// `work`: as the kernel that reads them is told of it.
MeansParams means_params_of(const MeansPlan& plan, const Problem& problem, const WorkParams& work, void* workspace);

}  // namespace dspattn::cuda::blocks
