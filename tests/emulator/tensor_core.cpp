#include "emulator/tensor_core.h"

#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "emulator/elements.h"
#include "emulator/machine.h"

namespace dspattn::emulator {
namespace {

struct Issued {
  Product product;
  std::array<Operands, kWarpgroup> operands;
  int threads = 0;  // that have issued it
};
using Issue = std::unique_ptr<Issued>;

struct ThreadQueue {
  std::uint64_t issued = 0;                // products so far
  std::vector<std::uint64_t> groups = {};  // products before the end of each committed group
};

struct Warpgroup {
  std::deque<Issue> queue;
  std::vector<Issue> spare = {};  // done: their memory serves the next
  std::uint64_t done = 0;
  std::array<ThreadQueue, kWarpgroup> threads;
  WaitList waiting;
};

std::vector<Warpgroup>& warpgroups() {
  static thread_local std::vector<Warpgroup> all;
  return all;
}

// A matrix in shared memory as a descriptor gives it. Only the 128-byte swizzle is emulated: bits 4 to 6 of an address
// are exchanged for their exclusive or with bits 7 to 9.
struct SharedMatrix {
  std::uint32_t start, leading, stride;

  SharedMatrix(std::uint64_t descriptor, std::uint32_t window) {
    start = window | static_cast<std::uint32_t>(descriptor & 0x3FFF) << 4;
    leading = static_cast<std::uint32_t>(descriptor >> 16 & 0x3FFF) << 4;
    stride = static_cast<std::uint32_t>(descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
      Machine::fail("a descriptor that is not 128-byte swizzled");
  }
  // 16 bytes that stay together.
  const std::uint8_t* chunk(std::uint32_t offset) const {
    std::uint32_t address = start + offset;
    address ^= address >> 3 & 0x70;
    return Machine::get().shared_beside(address, 16);
  }
  // Chunk of a matrix that is stored by rows of its long side, the depth along the 128-byte row.
  const std::uint8_t* by_depth(int row, int index) const {
    return chunk(static_cast<std::uint32_t>(row / 8) * stride + static_cast<std::uint32_t>(row % 8 * 128 + 16 * index));
  }
  // Chunk of one that is stored by rows of the depth, in panels of 128 bytes of columns.
  const std::uint8_t* by_columns(int k, int index) const {
    return chunk(static_cast<std::uint32_t>(index / 8) * leading + static_cast<std::uint32_t>(k / 8) * stride +
                 static_cast<std::uint32_t>(k % 8 * 128 + index % 8 * 16));
  }
};

// Word w of a row that lies in registers: the row's quad of lanes has 4 bytes each of the first 16, then of the others;
// rows 8 to 15 of a warp's 16 are in the odd registers.
std::uint32_t word_of_registers(const Issued& of, int row, int w) {
  const Operands& lane = of.operands[std::size_t(row / 16 * 32 + row % 8 * 4 + w % 4)];
  return lane.a[std::size_t((row % 16 >= 8 ? 1 : 0) + (w >= 4 ? 2 : 0))];
}

// The type of the elements is a template parameter here: what is read is most of the emulator's time.
template <DType kType>
RowOfA read_a(const Issued& of, int row) {
  constexpr int kBytes = bytes_of(kType), kInChunk = 16 / kBytes, kInWord = 4 / kBytes, kCount = 32 / kBytes;
  RowOfA a;
  if (of.product.a_rows_are_depth) {
    const SharedMatrix shared(of.product.a_descriptor, of.product.window);
    for (int k = 0; k < kCount; ++k) {
      a.values[std::size_t(k)] = decode<kType>(shared.by_columns(k, row / kInChunk) + row % kInChunk * kBytes);
    }
  } else if (of.product.a_in_shared) {
    const SharedMatrix shared(of.product.a_descriptor, of.product.window);
    for (int index = 0; index < 2; ++index) {
      const std::uint8_t* chunk = shared.by_depth(row, index);
      for (int i = 0; i < kInChunk; ++i) {
        a.values[std::size_t(index * kInChunk + i)] = decode<kType>(chunk + i * kBytes);
      }
    }
  } else {
    for (int w = 0; w < 8; ++w) {
      const std::uint32_t word = word_of_registers(of, row, w);
      for (int i = 0; i < kInWord; ++i) a.values[std::size_t(w * kInWord + i)] = decode_word<kType>(word, i);
    }
  }
  for (int i = 0; i < kCount; ++i) a.k[std::size_t(i)] = i;
  if (of.product.sparse) {
    // Lanes 2p and 2p + 1 of the row's quad; row g in the low half, row g + 8 in the high one.
    const int lane = row / 16 * 32 + row % 8 * 4 + 2 * of.product.metadata_pair;
    const int shift = row % 16 >= 8 ? 16 : 0;
    read_metadata(kType, of.operands[std::size_t(lane)].metadata >> shift,
                  of.operands[std::size_t(lane + 1)].metadata >> shift, a);
  }
  return a;
}

// By rows of the depth.
template <DType kType>
const std::vector<float>& read_b(const Product& product, int depth) {
  constexpr int kBytes = bytes_of(kType), kInChunk = 16 / kBytes;
  const SharedMatrix shared(product.b_descriptor, product.window);
  const int columns = product.columns;
  static thread_local std::vector<float> b;  // one product after the other
  b.resize(static_cast<std::size_t>(depth * columns));
  if (product.b_rows_are_depth) {
    for (int k = 0; k < depth; ++k) {
      for (int column = 0; column < columns; column += kInChunk) {
        const std::uint8_t* chunk = shared.by_columns(k, column / kInChunk);
        float* to = b.data() + k * columns + column;
        for (int i = 0; i < kInChunk; ++i) to[i] = decode<kType>(chunk + i * kBytes);
      }
    }
  } else {
    for (int column = 0; column < columns; ++column) {
      for (int k = 0; k < depth; k += kInChunk) {
        const std::uint8_t* chunk = shared.by_depth(column, k / kInChunk);
        float* to = b.data() + k * columns + column;
        for (int i = 0; i < kInChunk; ++i) to[i * columns] = decode<kType>(chunk + i * kBytes);
      }
    }
  }
  return b;
}

// Eight columns: compilers leave an array of sums that is not called a vector to scalar instructions.
using EightColumns = float __attribute__((vector_size(32)));
constexpr int kBlock = 16;  // columns whose sums stay in registers

// One row's sums of a block of columns. The same multiplications and additions with and without AVX2: no FMA.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default")))
#endif
void sum_block(const RowOfA& a, int count, const float* b, int columns, float* sums) {
  EightColumns low{}, high{};
  for (std::size_t i = 0; i < std::size_t(count); ++i) {
    const float* y = b + a.k[i] * columns;
    EightColumns first, second;
    std::memcpy(&first, y, sizeof first);
    std::memcpy(&second, y + 8, sizeof second);
    low += a.values[i] * first;
    high += a.values[i] * second;
  }
  std::memcpy(sums, &low, sizeof low);
  std::memcpy(sums + 8, &high, sizeof high);
}

template <DType kType>
void compute_as(Issued& of) {
  constexpr int kCount = 32 / bytes_of(kType);  // values of a row of A
  const int columns = of.product.columns;
  const std::vector<float>& b = read_b<kType>(of.product, of.product.sparse ? 2 * kCount : kCount);
  for (int row = 0; row < 64; ++row) {
    const RowOfA a = read_a<kType>(of, row);
    Operands* quad = &of.operands[std::size_t(row / 16 * 32 + row % 8 * 4)];
    const int upper = row % 16 >= 8 ? 2 : 0;
    for (int begin = 0; begin < columns; begin += kBlock) {
      std::array<float, kBlock> sums;
      sum_block(a, kCount, b.data() + begin, columns, sums.data());
      for (int column = 0; column < kBlock; ++column) {
        float& to = quad[column % 8 / 2].accumulators[(begin + column) / 8 * 4 + upper + column % 2];
        to = (of.product.accumulate ? to : 0.0f) + sums[std::size_t(column)];
      }
    }
  }
}

void compute(Issued& of) {
  switch (of.product.type) {
    case DType::bf16:
      return compute_as<DType::bf16>(of);
    case DType::f16:
      return compute_as<DType::f16>(of);
    default:
      return compute_as<DType::f32>(of);
  }
}

bool same(const Product& x, const Product& y) {
  return x.type == y.type && x.columns == y.columns && x.sparse == y.sparse && x.metadata_pair == y.metadata_pair &&
         x.accumulate == y.accumulate && x.a_in_shared == y.a_in_shared && x.a_rows_are_depth == y.a_rows_are_depth &&
         x.a_descriptor == y.a_descriptor && x.b_descriptor == y.b_descriptor &&
         x.b_rows_are_depth == y.b_rows_are_depth;
}

Warpgroup& own() { return warpgroups()[static_cast<std::size_t>(Machine::get().thread() / kWarpgroup)]; }
ThreadQueue& own_queue() { return own().threads[static_cast<std::size_t>(Machine::get().thread() % kWarpgroup)]; }

}  // namespace

void issue(const Product& product, const Operands& operands) {
  Machine::require_hopper("wgmma");
  Warpgroup& warpgroup = own();
  const std::uint64_t at = own_queue().issued++ - warpgroup.done;
  if (at == warpgroup.queue.size()) {
    if (warpgroup.spare.empty()) warpgroup.spare.push_back(std::make_unique<Issued>());
    warpgroup.queue.push_back(std::move(warpgroup.spare.back()));
    warpgroup.spare.pop_back();
    Issued& fresh = *warpgroup.queue.back();
    fresh.product = product;
    fresh.product.window = Machine::get().window();
    fresh.threads = 0;
  }
  Issued& issued = *warpgroup.queue[static_cast<std::size_t>(at)];
  if (!same(issued.product, product)) Machine::fail("threads of a warpgroup issue different products");
  issued.operands[static_cast<std::size_t>(Machine::get().thread() % kWarpgroup)] = operands;
  ++issued.threads;
}

void commit_products() { own_queue().groups.push_back(own_queue().issued); }

void await_products(int pending_groups) {
  Warpgroup& warpgroup = own();
  ThreadQueue& queue = own_queue();
  if (queue.groups.size() <= static_cast<std::size_t>(pending_groups)) return;
  const std::uint64_t until = queue.groups[queue.groups.size() - 1 - static_cast<std::size_t>(pending_groups)];
  while (warpgroup.done < until) Machine::get().wait(warpgroup.waiting, "products");
  if (queue.groups.size() > 64) queue.groups.erase(queue.groups.begin(), queue.groups.end() - 8);
}

void reset_tensor_core(int threads) {
  warpgroups() = std::vector<Warpgroup>(static_cast<std::size_t>((threads + kWarpgroup - 1) / kWarpgroup));
}

bool advance_tensor_core() {
  bool any = false;
  for (Warpgroup& warpgroup : warpgroups()) {
    if (warpgroup.queue.empty() || warpgroup.queue.front()->threads < kWarpgroup) continue;
    compute(*warpgroup.queue.front());
    warpgroup.spare.push_back(std::move(warpgroup.queue.front()));
    warpgroup.queue.pop_front();
    ++warpgroup.done;
    Machine::get().wake(warpgroup.waiting);
    any = true;
  }
  return any;
}

}  // namespace dspattn::emulator
