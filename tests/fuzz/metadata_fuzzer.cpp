// Decoding of sparse metadata made of arbitrary words and shapes: refused with dspattn::Error, or decoded to indices
// that ascend within the group and survive another encoding.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "dspattn/error.h"
#include "dspattn/nm_matrix.h"

namespace {

using namespace dspattn;

// The words of a matrix of zeros with its indices drawn, so that most inputs get past the checks; then some are
// changed.
std::vector<std::uint16_t> plausible(FuzzedDataProvider& data, std::size_t count) {
  constexpr std::uint16_t kCodes[] = {0x4, 0x8, 0x9, 0xC, 0xD, 0xE};
  std::vector<std::uint16_t> words(count);
  for (std::uint16_t& word : words) {
    for (int nibble = 0; nibble < 4; ++nibble) {
      word = static_cast<std::uint16_t>(word << 4 | data.PickValueInArray(kCodes));
    }
  }
  while (data.remaining_bytes() > 0 && !words.empty()) {
    words[data.ConsumeIntegralInRange<std::size_t>(0, words.size() - 1)] = data.ConsumeIntegral<std::uint16_t>();
  }
  return words;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  FuzzedDataProvider data(bytes, size);
  const auto rows = data.ConsumeIntegralInRange<std::int64_t>(-1, 70);
  const auto cols = data.ConsumeIntegralInRange<std::int64_t>(-1, 140);
  const Pattern pattern = data.ConsumeBool() ? Pattern{2, 4} : Pattern{1, data.ConsumeIntegralInRange<int>(1, 4)};
  const Grouping grouping = data.ConsumeBool() ? Grouping::consecutive : Grouping::interleaved;
  const auto dtype = static_cast<DType>(data.ConsumeIntegralInRange<int>(0, 4));
  try {
    const MetadataShape shape = metadata_shape(rows, cols, pattern, grouping, dtype);
    auto count = static_cast<std::size_t>(shape.rows * shape.block_columns);
    if (data.ConsumeProbability<float>() < 0.05F) count = data.ConsumeIntegralInRange<std::size_t>(0, 100);
    const std::vector<std::uint16_t> metadata = plausible(data, count);
    const std::vector<std::uint8_t> indices = decode_metadata(metadata, rows, cols, pattern, grouping, dtype);

    const auto keep = static_cast<std::size_t>(pattern.keep);
    for (std::size_t i = 0; i < indices.size(); ++i) {
      if (indices[i] >= pattern.group) std::abort();
      if (i % keep != 0 && indices[i] <= indices[i - 1]) std::abort();
    }
    const NmMatrix matrix(rows, cols, pattern, grouping, dtype,
                          std::vector<std::byte>(indices.size() * size_bytes(dtype)), indices);
    if (decode_metadata(encode_metadata(matrix), rows, cols, pattern, grouping, dtype) != indices) std::abort();
  } catch (const Error& error) {
    if (error.reasons().empty()) std::abort();
  }
  return 0;
}
