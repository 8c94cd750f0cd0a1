// N:M patterns and which keys form a group. See docs/notation.md.
//
// The keys of a query row are partitioned into groups of `group` keys; the `keep` largest scores of each group stay.
// The maps between a key and its place (group, element) are written once, here; every backend uses them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#if defined(__CUDACC__)
#define DSPATTN_HOST_DEVICE __host__ __device__
#else
#define DSPATTN_HOST_DEVICE
#endif

namespace dspattn {

inline constexpr int kMaxGroup = 32;
inline constexpr int kInterleaveBlock = 128;  // keys per block of the interleaved grouping; the fused kernel's key tile

struct Pattern {
  int keep = 2;
  int group = 4;

  static constexpr Pattern dense() { return {1, 1}; }
  DSPATTN_HOST_DEVICE constexpr bool is_dense() const { return keep == group; }
  constexpr bool operator==(const Pattern&) const = default;
};

enum class Grouping : std::uint8_t {
  consecutive,  // group g holds keys g*group ... g*group + group-1 (the paper's)
  interleaved,  // blocks of 128 keys; group r of a block holds its keys r, r + 128/group, r + 2*128/group, ...
};

// "2:4", "1:2", ... or "dense". Throws dspattn::Error for anything else.
Pattern parse_pattern(std::string_view text);
// "consecutive" or "interleaved". Throws dspattn::Error for anything else.
Grouping parse_grouping(std::string_view text);
std::string to_string(Pattern pattern);
std::string to_string(Grouping grouping);

// A key's place: which group of the row, and which element of that group. Elements ascend with the key index.
struct KeyPlace {
  std::int64_t group = 0;
  int element = 0;
  constexpr bool operator==(const KeyPlace&) const = default;
};

DSPATTN_HOST_DEVICE constexpr KeyPlace place_of_key(std::int64_t key, int group_size, Grouping grouping) {
  if (grouping == Grouping::consecutive) {
    return {key / group_size, static_cast<int>(key % group_size)};
  }
  const std::int64_t groups_per_block = kInterleaveBlock / group_size;
  const std::int64_t in_block = key % kInterleaveBlock;
  return {key / kInterleaveBlock * groups_per_block + in_block % groups_per_block,
          static_cast<int>(in_block / groups_per_block)};
}

DSPATTN_HOST_DEVICE constexpr std::int64_t key_at_place(std::int64_t group, int element, int group_size,
                                                        Grouping grouping) {
  if (grouping == Grouping::consecutive) {
    return group * group_size + element;
  }
  const std::int64_t groups_per_block = kInterleaveBlock / group_size;
  return group / groups_per_block * kInterleaveBlock + element * groups_per_block + group % groups_per_block;
}

// How many groups a row of n keys has, the last ones completed with masked keys.
DSPATTN_HOST_DEVICE constexpr std::int64_t group_count(std::int64_t keys, int group_size, Grouping grouping) {
  if (grouping == Grouping::consecutive) {
    return (keys + group_size - 1) / group_size;
  }
  return (keys + kInterleaveBlock - 1) / kInterleaveBlock * (kInterleaveBlock / group_size);
}

}  // namespace dspattn
