// Asynchronous copies: a thread's own (cp.async), and those of TMA (TMA), boxes of tensors to and from
// shared memory in the 128-byte swizzle. What is asked for may be read and written at any time until it is waited for.
#pragma once

#include <array>
#include <cstdint>

namespace dspattn::emulator {

// `size` bytes, those from `bytes` on zeros.
void copy_async(std::uint32_t destination, const void* source, int bytes, std::uint32_t size);
void commit_copies();                           // of the running thread since the last call: a group
void await_copies(std::size_t pending_groups);  // until no more of its groups are under way
void await_copies();                            // all, committed or not

using Coordinates = std::array<int, 5>;

void load_box(std::uint32_t destination, const void* map, std::uint32_t barrier, const Coordinates& at, int rank);
void load_bytes(std::uint32_t destination, const void* source, int bytes, std::uint32_t barrier);
void store_box(const void* map, std::uint32_t source, const Coordinates& at, int rank);
void await_stores();  // of the running thread, until shared memory has been read

}  // namespace dspattn::emulator
