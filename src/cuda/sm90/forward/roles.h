// What a warp of the fused forward's producer does. The other warpgroups consume.
#pragma once

#include <cstdint>

namespace dspattn::cuda::sm90 {

enum class Role : std::uint8_t {
  load_k,          // producer warps: K tiles by TMA,
  load_v,          // V tiles,
  load_kv,         // or both;
  load_q,          // takes the items, loads their Q and describes them
  complete_tails,  // completes key blocks in which a sequence ends; multiplies by 2^-e what of Q stays in shared memory
  store_results,   // full variant: writes what the consumers leave in shared memory
  load_everything,  // general variant: all 128 producer threads load, and copy what TMA cannot
  idle,
  write_means,  // rest = mean, whole key blocks: the means of V, where no kernel before writes them
};

// `ragged`: sequences may end within a key block.
template <typename C>
__device__ __forceinline__ Role producer_role(int warp, bool ragged) {
  if (C::kGeneral) return Role::load_everything;
  // K and V by warps of their own need not wait until one another's stages are free. Where Q stays in shared memory two
  // more warps are needed to scale it.
  if (C::kTileWarps == 2) {
    if (warp < 3) return warp == 0 ? Role::load_k : warp == 1 ? Role::load_v : Role::load_q;
    if (C::kFull) return Role::store_results;
    return ragged ? Role::complete_tails : C::kWritesMeans ? Role::write_means : Role::idle;
  }
  return warp == 0 ? Role::load_kv : warp == 1 ? Role::load_q : Role::complete_tails;
}

}  // namespace dspattn::cuda::sm90
