// The sizes and buffers of one tile of work, shared by every stage of the CPU kernels.
//
// A tile is kTileQ query rows against one block of at most kTileK keys. It lies transposed: the rows of a tile are the
// lanes of a vector, so that choosing within a group, the running maximum, exponentials and masks are all vertical
// operations, for either grouping, and no stage ever moves data across lanes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dspattn::cpu {

inline constexpr int kTileQ = 32;        // rows: two AVX-512 vectors, which with 8 keys fill 16 accumulators
inline constexpr int kTileK = 128;       // keys: one block of the interleaved grouping; a V panel of 32 KiB stays in L1
inline constexpr int kPanel = 64;        // columns of K or V held together; 64 floats x 128 keys = 32 KiB
inline constexpr int kPad = 16;          // columns are filled with zeros to a multiple of the widest vector
inline constexpr int kKeysTogether = 8;  // keys a product takes at a time at most, on any target

constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// A block of keys in fp32: [panels][kTileK + 1][width]. Row kTileK of each panel is zero: slots that hold no key point
// there, so that whatever lies in a masked key's row cannot reach the output.
struct PanelShape {
  int columns = 0;  // d or d_v
  int padded = 0;   // columns, filled up to a multiple of kPad
  int width = 0;    // columns per panel, and the stride of its rows: 16, 32 or 64
  int panels = 0;

  // Panels of one width serve tensors of both: `widest` is the larger of d and d_v where slots index panels of K and V.
  static constexpr PanelShape of(std::int64_t columns, std::int64_t widest = 0) {
    PanelShape shape;
    shape.columns = static_cast<int>(columns);
    shape.padded = static_cast<int>(round_up(columns, kPad));
    shape.width = kPad;
    while (shape.width < kPanel && (shape.width < columns || shape.width < widest)) shape.width *= 2;
    shape.panels = (shape.padded + shape.width - 1) / shape.width;
    return shape;
  }
  constexpr std::size_t panel_elems() const {
    return static_cast<std::size_t>(kTileK + 1) * static_cast<std::size_t>(width);
  }
  constexpr std::size_t elems() const { return panel_elems() * static_cast<std::size_t>(panels); }
  constexpr int columns_of(int panel) const {
    const int left = padded - panel * width;
    return left < width ? left : width;
  }
};

static_assert(kTileK * kPanel <= 65535, "offsets within a panel are 16-bit: four of them are one load");

// One number per slot and row.
struct alignas(64) SlotValues {
  float at[kTileK][kTileQ];
};

// What selection leaves of a tile: slot s of row r holds one kept score and where its key's row begins in a panel.
// Every row has the same number of slots; a row that kept fewer points to the zero row with score -inf (weight 0).
struct alignas(64) Slots {
  SlotValues value;                      // scores, then weights
  std::uint16_t offset[kTileK][kTileQ];  // in elements from the start of a panel of `width` columns
  float row_max[kTileQ];                 // largest kept score
  float has_nan[kTileQ];                 // not zero: an unmasked score is NaN
  int count = 0;
  bool masked = false;    // some slots may hold no key
  bool all_keys = false;  // dense and nothing masked: slot s is key s in every row
};

// The same selection seen from the keys: bit r of rows[key] says that row r keeps the key.
struct KeptRows {
  std::uint32_t rows[kTileK];
};
static_assert(kTileQ == 32);

// One number per key and row. The last row stands for slots that hold no key, as in panels.
struct alignas(64) ScoreTile {
  float value[kTileK + 1][kTileQ];
};

// The keys [begin, end) of the current block that each row of a tile may see.
struct alignas(64) LaneLimits {
  std::int32_t begin[kTileQ];
  std::int32_t end[kTileQ];
};

// Buffers between the scores of a tile and its slots.
struct PruneScratch {
  ScoreTile scores;
  ScoreTile bias;
  ScoreTile sums;    // of weights, where heads choose together
  ScoreTile capped;  // the products under a soft cap, if there is one, without the bias
  LaneLimits limits;
};

// Lays arrays one after another, 64-byte aligned. Made without memory it only measures.
class Carver {
 public:
  explicit Carver(unsigned char* memory) : memory_(memory) {}

  template <typename T>
  T* take(std::size_t count) {
    T* array = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return array;
  }
  std::size_t bytes() const { return used_; }

 private:
  unsigned char* memory_;
  std::size_t used_ = 0;
};

}  // namespace dspattn::cpu
