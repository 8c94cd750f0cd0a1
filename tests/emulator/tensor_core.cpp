#include "emulator/tensor_core.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "core/half.h"
#include "emulator/machine.h"

namespace dspattn::emulator {
namespace {

struct Issued {
  Product product;
  std::array<Operands, kWarpgroup> operands;
  int threads = 0;  // that have issued it
};

struct ThreadQueue {
  std::uint64_t issued = 0;                // products so far
  std::vector<std::uint64_t> groups = {};  // products before the end of each committed group
};

struct Warpgroup {
  std::deque<Issued> queue;
  std::uint64_t done = 0;
  std::array<ThreadQueue, kWarpgroup> threads;
  WaitList waiting;
};

std::vector<Warpgroup>& warpgroups() {
  static thread_local std::vector<Warpgroup> all;
  return all;
}

float decode(DType type, std::uint16_t bits) {
  return type == DType::bf16 ? core::decode_bf16(bits) : core::decode_f16(bits);
}

// A matrix in shared memory as a descriptor gives it. Only the 128-byte swizzle is emulated: bits 4 to 6 of an address
// are exchanged for their exclusive or with bits 7 to 9.
struct SharedMatrix {
  std::uint32_t start, leading, stride;

  explicit SharedMatrix(std::uint64_t descriptor) {
    start = static_cast<std::uint32_t>(descriptor & 0x3FFF) << 4;
    leading = static_cast<std::uint32_t>(descriptor >> 16 & 0x3FFF) << 4;
    stride = static_cast<std::uint32_t>(descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
      Machine::fail("a descriptor that is not 128-byte swizzled");
  }
  std::uint16_t at(std::uint32_t offset) const {
    std::uint32_t address = start + offset;
    address ^= address >> 3 & 0x70;
    std::uint16_t bits;
    std::memcpy(&bits, Machine::get().shared(address, 2), 2);
    return bits;
  }
  // Stored by rows of the long side, the depth along the 128-byte row.
  std::uint16_t by_depth(int row, int k) const {
    return at(static_cast<std::uint32_t>(row / 8) * stride + static_cast<std::uint32_t>(row % 8 * 128 + k * 2));
  }
  // Stored by rows of the depth, in panels of 64 columns.
  std::uint16_t by_columns(int k, int column) const {
    return at(static_cast<std::uint32_t>(column / 64) * leading + static_cast<std::uint32_t>(k / 8) * stride +
              static_cast<std::uint32_t>(k % 8 * 128 + column % 64 * 2));
  }
};

// Place of element (row, 2i and 2i + 1) of a 64 x 16 operand: thread, register.
struct Place {
  int thread, index;
};
Place place_of_pair(int row, int pair) {
  return {row / 16 * 32 + row % 8 * 4 + pair % 4, (row % 16 >= 8 ? 1 : 0) + (pair >= 4 ? 2 : 0)};
}

// The 16 values of a row of A that are multiplied, and by which row of B.
struct Factor {
  float value;
  int k;
};
using RowOfA = std::array<Factor, 16>;

RowOfA read_a(const Issued& of, int row) {
  RowOfA factors;
  for (int i = 0; i < 16; ++i) {
    std::uint16_t bits;
    if (of.product.a_in_shared) {
      bits = SharedMatrix(of.product.a_descriptor).by_depth(row, i);
    } else {
      const Place place = place_of_pair(row, i / 2);
      const std::uint32_t word = of.operands[std::size_t(place.thread)].a[std::size_t(place.index)];
      bits = static_cast<std::uint16_t>(i % 2 == 0 ? word : word >> 16);
    }
    int k = i;
    if (of.product.sparse) {
      // Value i is one of the two of group i / 2. The even lane of the pair has groups 0 to 3, the odd one 4 to 7; row
      // g in the low half.
      const int group = i / 2;
      const int lane = row / 16 * 32 + row % 8 * 4 + 2 * of.product.metadata_pair + group / 4;
      const std::uint32_t word = of.operands[std::size_t(lane)].metadata >> (row % 16 >= 8 ? 16 : 0);
      const std::uint32_t codes = word >> (4 * (group % 4)) & 15;
      const std::uint32_t first = codes & 3, second = codes >> 2;
      if (first >= second) Machine::fail("metadata that does not ascend: " + std::to_string(codes));
      k = 4 * group + static_cast<int>(i % 2 == 0 ? first : second);
    }
    factors[std::size_t(i)] = {decode(of.product.type, bits), k};
  }
  return factors;
}

std::vector<float> read_b(const Product& product, int depth) {
  const SharedMatrix shared(product.b_descriptor);
  std::vector<float> b(static_cast<std::size_t>(depth * product.columns));
  for (int k = 0; k < depth; ++k) {
    for (int column = 0; column < product.columns; ++column) {
      const std::uint16_t bits = product.b_rows_are_depth ? shared.by_columns(k, column) : shared.by_depth(column, k);
      b[static_cast<std::size_t>(k * product.columns + column)] = decode(product.type, bits);
    }
  }
  return b;
}

void compute(Issued& of) {
  const int columns = of.product.columns;
  const std::vector<float> b = read_b(of.product, of.product.sparse ? 32 : 16);
  std::vector<float> sums(static_cast<std::size_t>(columns));
  for (int row = 0; row < 64; ++row) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (const Factor& factor : read_a(of, row)) {
      const float* y = b.data() + factor.k * columns;
      for (int column = 0; column < columns; ++column) sums[std::size_t(column)] += factor.value * y[column];
    }
    const int thread = row / 16 * 32 + row % 8 * 4;
    for (int column = 0; column < columns; ++column) {
      float* d = of.operands[std::size_t(thread + column % 8 / 2)].accumulators;
      float& to = d[column / 8 * 4 + (row % 16 >= 8 ? 2 : 0) + column % 2];
      to = (of.product.accumulate ? to : 0.0f) + sums[std::size_t(column)];
    }
  }
}

bool same(const Product& x, const Product& y) {
  return x.type == y.type && x.columns == y.columns && x.sparse == y.sparse && x.metadata_pair == y.metadata_pair &&
         x.accumulate == y.accumulate && x.a_in_shared == y.a_in_shared && x.a_descriptor == y.a_descriptor &&
         x.b_descriptor == y.b_descriptor && x.b_rows_are_depth == y.b_rows_are_depth;
}

Warpgroup& own() { return warpgroups()[static_cast<std::size_t>(Machine::get().thread() / kWarpgroup)]; }
ThreadQueue& own_queue() { return own().threads[static_cast<std::size_t>(Machine::get().thread() % kWarpgroup)]; }

}  // namespace

void issue(const Product& product, const Operands& operands) {
  Warpgroup& warpgroup = own();
  const std::uint64_t at = own_queue().issued++ - warpgroup.done;
  if (at == warpgroup.queue.size()) {
    warpgroup.queue.emplace_back();
    warpgroup.queue.back().product = product;
  }
  Issued& issued = warpgroup.queue[static_cast<std::size_t>(at)];
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
  warpgroups().assign(static_cast<std::size_t>((threads + kWarpgroup - 1) / kWarpgroup), {});
}

bool advance_tensor_core() {
  bool any = false;
  for (Warpgroup& warpgroup : warpgroups()) {
    if (warpgroup.queue.empty() || warpgroup.queue.front().threads < kWarpgroup) continue;
    compute(warpgroup.queue.front());
    warpgroup.queue.pop_front();
    ++warpgroup.done;
    Machine::get().wake(warpgroup.waiting);
    any = true;
  }
  return any;
}

}  // namespace dspattn::emulator
