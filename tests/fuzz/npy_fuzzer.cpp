// The .npy reader on arbitrary bytes: it gives an array whose size fits its shape, or throws dspattn::Error; it never
// crashes and never allocates more than the file could hold.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>

#include "apps/npy.h"
#include "dspattn/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace dspattn;
  for (const apps::NpyUse use : {apps::NpyUse::numbers, apps::NpyUse::bf16_bits, apps::NpyUse::mask}) {
    std::istringstream stream(std::string(reinterpret_cast<const char*>(bytes), size));
    try {
      const apps::NpyArray array = apps::read_npy(stream, size, "file.npy", use);
      std::size_t expected = size_bytes(array.dtype);
      for (const std::int64_t extent : array.shape) expected *= static_cast<std::size_t>(extent);
      if (array.bytes.size() != expected || array.bytes.size() > size) std::abort();
    } catch (const Error& error) {
      if (error.reasons().size() != 1 || !error.reasons()[0].starts_with("file.npy: ")) std::abort();
    }
  }
  return 0;
}
