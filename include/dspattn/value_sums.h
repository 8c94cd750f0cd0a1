// Sums of V over blocks of 128 keys, kept by the caller beside a cache of keys and values, so that attention with rest
// = mean reads of V the kept rows alone (Problem::value_sums).
//
//   dspattn::ValueSumsArgs update;
//   update.v = v;                                 // the cache, or pages with a block_table
//   update.sums = {sums, dspattn::DType::f32, {batch, kv_heads, 2 * (n_k / 128), d_v + 1}};
//   update.key_lengths = lengths;                 // with the new keys; without: every sequence has n_k
//   update.new_keys = 1;                          // after a prompt: as many as it has
//   dspattn::update_value_sums(update);
//
// Of block b of a sequence, its keys 128 b ... 128 b + 127, row 2 b of the sums has V's sum over the block and row 2 b
// + 1 that over all blocks up to it; the last column has how many keys they are of. Rows of blocks that are not whole,
// at or past the length, hold anything. Who reorders the sequences of a cache reorders these with them; who shortens
// one counts the keys that replace the old ones as new.
#pragma once

#include <cstdint>

#include "dspattn/attention.h"
#include "dspattn/error.h"
#include "dspattn/tensor_view.h"

namespace dspattn {

struct ValueSumsArgs {
  Device device;
  ConstTensorView v;            // [batch, kv_heads, n_k, d_v], or [pages, kv_heads, page size, d_v]
  ConstTensorView block_table;  // int32 [batch, blocks]; optional, as Problem's
  ConstTensorView key_lengths;  // int32 [batch]; optional
  std::int64_t new_keys = 0;    // of every sequence the last so many are new, or more of them than are
  TensorView sums;              // fp32 [batch, kv_heads, 2 * blocks, d_v + 1] of n_k / 128 blocks or more
  void* stream = nullptr;       // cudaStream_t; null on the CPU
};

// Brings the sums of every whole block that has a new key up to date, and of all before it those after. Adds in a fixed
// order, in fp32. GPU work is enqueued on the stream and not waited for; nothing is read on the host, so that a CUDA
// graph may hold it while lengths grow. Throws Error.
void update_value_sums(const ValueSumsArgs& args);

}  // namespace dspattn
