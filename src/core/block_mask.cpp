#include "dspattn/block_mask.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dspattn/error.h"

namespace dspattn {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014): a stateless mix, so that a mask depends on its seed alone and not on a
// library's random engine.
std::uint64_t mix(std::uint64_t state) {
  state += 0x9E3779B97F4A7C15u;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
  return state ^ (state >> 31);
}

void require_parts(const BigbirdParts& parts) {
  std::vector<std::string> reasons;
  const auto check = [&](const char* argument, std::int64_t value) {
    if (value < 0) reasons.push_back(std::string(argument) + ": expected a count >= 0, got " + std::to_string(value));
  };
  check("window", parts.window);
  check("global", parts.global);
  check("random", parts.random);
  if (!reasons.empty()) throw Error(std::move(reasons));
}

void require_sizes(std::int64_t n_q, std::int64_t n_k, int block) {
  constexpr std::int64_t kMaxLength = std::int64_t{1} << 30;  // what the functions that take a block mask serve
  std::vector<std::string> reasons;
  if (block != 64 && block != 128) reasons.push_back("block: expected 64 or 128, got " + std::to_string(block));
  const auto check = [&](const char* argument, std::int64_t value) {
    if (value >= 0 && value <= kMaxLength) return;
    reasons.push_back(std::string(argument) + ": expected a length from 0 to " + std::to_string(kMaxLength) + ", got " +
                      std::to_string(value));
  };
  check("n_q", n_q);
  check("n_k", n_k);
  if (!reasons.empty()) throw Error(std::move(reasons));
}

// The block columns that a row does not see by window and global blocks, in order, without a list of them: those before
// the window, from `first` on, and those from `after` on behind it.
struct UnseenBlocks {
  std::int64_t first, before, after, size;  // `before`: how many lie before the window
  std::int32_t at(std::int64_t i) const {
    return static_cast<std::int32_t>(i < before ? first + i : after + (i - before));
  }
};

// Adds what a shuffle of the rest, after its first `random` steps, has in its first places. The places that the steps
// exchange are kept beside it, so that the work is by what is drawn and not by what there is.
void draw_blocks(const UnseenBlocks& rest, const BigbirdParts& parts, std::int64_t row,
                 std::vector<std::int32_t>& kept) {
  const std::int64_t draws = std::min(parts.random, rest.size);
  std::unordered_map<std::int64_t, std::int32_t> moved;
  const auto at = [&](std::int64_t place) {
    const auto found = moved.find(place);
    return found == moved.end() ? rest.at(place) : found->second;
  };
  for (std::int64_t i = 0; i < draws; ++i) {
    const std::uint64_t bits =
        mix(mix(parts.seed) ^ mix(static_cast<std::uint64_t>(row)) ^ (static_cast<std::uint64_t>(i) + 1));
    const std::int64_t other = i + static_cast<std::int64_t>(bits % static_cast<std::uint64_t>(rest.size - i));
    kept.push_back(at(other));
    moved[other] = at(i);  // place i itself is not looked at again
  }
}

BlockMask build(std::int64_t n_q, std::int64_t n_k, const BigbirdParts& parts) {
  require_parts(parts);
  require_sizes(n_q, n_k, parts.block);
  const std::int64_t block_rows = (n_q + parts.block - 1) / parts.block;
  const std::int64_t block_columns = (n_k + parts.block - 1) / parts.block;
  const std::int64_t window = std::min(parts.window, block_rows + block_columns);  // it may be the largest number
  std::vector<std::vector<std::int32_t>> rows(static_cast<std::size_t>(block_rows));
  for (std::int64_t row = 0; row < block_rows; ++row) {
    const std::int64_t diagonal = row + block_columns - block_rows;
    const std::int64_t end = parts.causal ? std::clamp<std::int64_t>(diagonal + 1, 0, block_columns) : block_columns;
    // Global blocks, then what lies before the window, the window, and what lies behind it.
    const std::int64_t global = row < parts.global ? end : std::min(parts.global, end);
    const std::int64_t begin = std::clamp(diagonal - window, global, end);
    const std::int64_t after = std::clamp(diagonal + window + 1, begin, end);
    const UnseenBlocks rest{global, begin - global, after, begin - global + end - after};
    std::vector<std::int32_t>& kept = rows[static_cast<std::size_t>(row)];
    kept.resize(static_cast<std::size_t>(global + after - begin));
    std::iota(kept.begin(), kept.begin() + global, 0);
    std::iota(kept.begin() + global, kept.end(), static_cast<std::int32_t>(begin));
    draw_blocks(rest, parts, row, kept);
  }
  return make_block_mask(n_q, n_k, parts.block, rows);
}

}  // namespace

bool BlockMask::allows(std::int64_t query, std::int64_t key) const {
  require_sizes(n_q, n_k, block);
  std::vector<std::string> reasons;
  const auto check = [&](const char* argument, std::int64_t value, std::int64_t end) {
    if (value >= 0 && value < end) return;
    reasons.push_back(std::string(argument) + ": expected from 0 to below " + std::to_string(end) + ", got " +
                      std::to_string(value));
  };
  check("query", query, n_q);
  check("key", key, n_k);
  // The members are the caller's to change, and to move away.
  if (std::ssize(counts) != block_rows() || width < 0 || std::ssize(columns) != block_rows() * width) {
    reasons.push_back("counts, columns: expected those of " + std::to_string(block_rows()) + " block rows, got " +
                      std::to_string(counts.size()) + " and " + std::to_string(columns.size()) + " elements");
  }
  if (!reasons.empty()) throw Error(std::move(reasons));
  const std::int64_t row = query / block;
  const auto first = columns.begin() + static_cast<std::ptrdiff_t>(row * width);
  const std::int32_t count = counts[static_cast<std::size_t>(row)];
  if (count < 0 || count > width) {
    throw Error("counts[" + std::to_string(row) + "]: expected from 0 to " + std::to_string(width) + ", got " +
                std::to_string(count));
  }
  return std::binary_search(first, first + count, static_cast<std::int32_t>(key / block));
}

double BlockMask::density() const {
  double kept = 0;
  for (const std::int32_t count : counts) kept += count;
  const double all = static_cast<double>(block_rows()) * static_cast<double>(block_columns());
  return all > 0 ? kept / all : 0;
}

BlockMaskView BlockMask::view() const {
  BlockMaskView result;
  result.block = block;
  result.counts = ConstTensorView(counts.data(), DType::i32, {block_rows()});
  result.columns = ConstTensorView(columns.data(), DType::i32, {block_rows(), width});
  return result;
}

BlockMask make_block_mask(std::int64_t n_q, std::int64_t n_k, int block,
                          const std::vector<std::vector<std::int32_t>>& rows) {
  require_sizes(n_q, n_k, block);
  std::vector<std::string> reasons;
  BlockMask mask;
  mask.block = block;
  mask.n_q = n_q;
  mask.n_k = n_k;
  if (static_cast<std::int64_t>(rows.size()) != mask.block_rows()) {
    throw Error("rows: expected a list for each of " + std::to_string(mask.block_rows()) + " block rows, got " +
                std::to_string(rows.size()));
  }
  for (const auto& row : rows) mask.width = std::max(mask.width, static_cast<std::int64_t>(row.size()));
  mask.columns.assign(rows.size() * static_cast<std::size_t>(mask.width), -1);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::vector<std::int32_t> sorted = rows[r];
    std::sort(sorted.begin(), sorted.end());
    const std::string where = "rows[" + std::to_string(r) + "]";
    if (!sorted.empty() && (sorted.front() < 0 || sorted.back() >= mask.block_columns())) {
      reasons.push_back(where + ": expected block columns from 0 to " + std::to_string(mask.block_columns() - 1) +
                        ", got " + std::to_string(sorted.front() < 0 ? sorted.front() : sorted.back()));
    }
    if (const auto twin = std::adjacent_find(sorted.begin(), sorted.end()); twin != sorted.end()) {
      reasons.push_back(where + ": expected each block column once, got " + std::to_string(*twin) + " twice");
    }
    mask.counts.push_back(static_cast<std::int32_t>(sorted.size()));
    std::copy(sorted.begin(), sorted.end(), mask.columns.begin() + static_cast<std::ptrdiff_t>(r) * mask.width);
  }
  if (!reasons.empty()) throw Error(std::move(reasons));
  return mask;
}

BlockMask sliding_window_blocks(std::int64_t n_q, std::int64_t n_k, const SlidingWindowParts& parts) {
  return build(n_q, n_k, {.block = parts.block, .window = parts.window, .causal = parts.causal});
}

BlockMask longformer_blocks(std::int64_t n_q, std::int64_t n_k, const LongformerParts& parts) {
  return build(n_q, n_k,
               {.block = parts.block, .window = parts.window, .global = parts.global, .causal = parts.causal});
}

BlockMask bigbird_blocks(std::int64_t n_q, std::int64_t n_k, const BigbirdParts& parts) {
  return build(n_q, n_k, parts);
}

}  // namespace dspattn
