// The copy engine (TMA): boxes of tensors to and from shared memory, in the 128-byte swizzle.
#pragma once

#include <array>
#include <cstdint>

namespace dspattn::emulator {

using Coordinates = std::array<int, 5>;

void load_box(std::uint32_t destination, const void* map, std::uint32_t barrier, const Coordinates& at, int rank);
void load_bytes(std::uint32_t destination, const void* source, int bytes, std::uint32_t barrier);
void store_box(const void* map, std::uint32_t source, const Coordinates& at, int rank);
void await_stores();  // of the running thread, until shared memory has been read

}  // namespace dspattn::emulator
