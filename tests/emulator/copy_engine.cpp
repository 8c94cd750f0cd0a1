#include "emulator/copy_engine.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "cuda/ptx/single.h"
#include "emulator/machine.h"

namespace dspattn::emulator {
namespace {

// Calls visit(shared address, pointer to the tensor's elements or null when they lie outside, bytes) for every piece of
// a box that is contiguous on both sides: of 16 bytes, which the swizzle leaves together, or of less at borders.
template <typename Visit>
void for_box(const CUtensorMap& map, std::uint32_t shared, const Coordinates& at, Visit visit) {
  std::array<int, 5> count{1, 1, 1, 1, 1};
  for (int i = 0; i < map.rank; ++i) {
    count[std::size_t(i)] = (map.box[std::size_t(i)] + map.steps[std::size_t(i)] - 1) / map.steps[std::size_t(i)];
  }
  const int element = map.element_bytes;
  std::uint32_t offset = 0;
  std::array<int, 5> index{};
  for (index[4] = 0; index[4] < count[4]; ++index[4]) {
    for (index[3] = 0; index[3] < count[3]; ++index[3]) {
      for (index[2] = 0; index[2] < count[2]; ++index[2]) {
        for (index[1] = 0; index[1] < count[1]; ++index[1]) {
          bool row_inside = true;
          std::int64_t row_bytes = 0;
          for (std::size_t i = 1; i < std::size_t(map.rank); ++i) {
            const std::int64_t x = std::int64_t{at[i]} + std::int64_t{index[i]} * map.steps[i];
            row_inside = row_inside && x >= 0 && x < map.extents[i];
            row_bytes += x * map.strides[i - 1];
          }
          for (int begin = 0; begin < count[0];) {
            std::uint32_t address = shared + offset;
            address ^= address >> 3 & 0x70;
            const std::int64_t x = std::int64_t{at[0]} + std::int64_t{begin} * map.steps[0];
            const bool inside = x >= 0 && x < map.extents[0];
            std::int64_t piece = 1;
            if (map.steps[0] == 1) {
              piece = std::min<std::int64_t>(count[0] - begin, (16 - int(address % 16)) / element);
              if (x < map.extents[0]) piece = std::min(piece, x < 0 ? -x : map.extents[0] - x);
            }
            const auto bytes = static_cast<std::uint32_t>(piece * element);
            visit(address,
                  row_inside && inside ? static_cast<std::uint8_t*>(map.data) + row_bytes + x * element : nullptr,
                  bytes);
            offset += bytes;
            begin += static_cast<int>(piece);
          }
        }
      }
    }
  }
}

std::int64_t box_bytes(const CUtensorMap& map) {
  std::int64_t bytes = map.element_bytes;
  for (std::size_t i = 0; i < std::size_t(map.rank); ++i) bytes *= (map.box[i] + map.steps[i] - 1) / map.steps[i];
  return bytes;
}

const CUtensorMap& checked(const void* map, std::uint32_t shared, int rank) {
  Machine::require_hopper("cp.async.bulk.tensor");
  const auto& tensor = *static_cast<const CUtensorMap*>(map);
  if (tensor.rank != rank) Machine::fail("a tensor map that is not set, or of another rank");
  if (shared % 128 != 0) Machine::fail("TMA needs 128-byte aligned shared memory");
  return tensor;
}

}  // namespace

void copy_async(std::uint32_t destination, const void* source, int bytes, std::uint32_t size) {
  if (destination % size != 0 || reinterpret_cast<std::uintptr_t>(source) % size != 0) {
    Machine::fail("an asynchronous copy that is not aligned");
  }
  Machine::Pending& pending = Machine::get().async_copies();
  const std::size_t group = pending.committed;
  pending.groups.resize(group + 1);
  ++pending.copies;
  ++pending.groups[group];
  const int thread = Machine::get().thread();
  Machine::get().later([=, &pending] {
    std::uint8_t* to = Machine::get().shared(destination, size);
    Machine::get().stored(destination, size, thread);
    std::memset(to, 0, size);
    if (bytes > 0) std::memcpy(to, source, static_cast<std::size_t>(bytes));
    --pending.copies;
    if (--pending.groups[group] == 0) Machine::get().wake(pending.waiting);
    if (pending.copies == 0) {
      for (const std::uint32_t barrier : pending.arrivals) Machine::get().mbarrier_arrive(barrier);
      pending.arrivals.clear();
    }
  });
}

void commit_copies() { ++Machine::get().async_copies().committed; }

void await_copies(std::size_t pending_groups) {
  Machine::Pending& pending = Machine::get().async_copies();
  const auto under_way = [&] {
    const std::size_t until = pending.committed - std::min(pending_groups, pending.committed);
    const auto end = pending.groups.begin() + static_cast<std::ptrdiff_t>(std::min(until, pending.groups.size()));
    return std::any_of(pending.groups.begin(), end, [](int copies) { return copies > 0; });
  };
  while (under_way()) Machine::get().wait(pending.waiting, "asynchronous copies");
}

void await_copies() {
  Machine::Pending& pending = Machine::get().async_copies();
  while (pending.copies > 0) Machine::get().wait(pending.waiting, "asynchronous copies");
}

void load_box(std::uint32_t destination, const void* map, std::uint32_t barrier, const Coordinates& at, int rank) {
  const CUtensorMap& tensor = checked(map, destination, rank);
  // A copy of the map: the parameters of a kernel, which outlive its threads, are here on the stack of one.
  Machine::get().later([=, tensor = tensor] {
    for_box(tensor, destination, at, [&](std::uint32_t address, const std::uint8_t* elements, std::uint32_t bytes) {
      std::uint8_t* to = Machine::get().shared_written_beside(address, bytes);
      if (elements == nullptr) {
        std::memset(to, 0, bytes);
      } else if (tensor.rounds_to_tf32) {
        for (std::uint32_t i = 0; i < bytes; i += 4) {
          float value;
          std::memcpy(&value, elements + i, 4);
          const std::uint32_t rounded = cuda::ptx::round_tf32(value);
          std::memcpy(to + i, &rounded, 4);
        }
      } else {
        std::memcpy(to, elements, bytes);
      }
    });
    Machine::get().mbarrier_delivered(barrier, box_bytes(tensor));
  });
}

void load_bytes(std::uint32_t destination, const void* source, int bytes, std::uint32_t barrier) {
  Machine::require_hopper("cp.async.bulk");
  if (destination % 16 != 0 || reinterpret_cast<std::uintptr_t>(source) % 16 != 0 || bytes % 16 != 0) {
    Machine::fail("a bulk copy that is not aligned to 16 bytes");
  }
  Machine::get().later([=] {
    std::memcpy(Machine::get().shared_written_beside(destination, std::uint32_t(bytes)), source, std::size_t(bytes));
    Machine::get().mbarrier_delivered(barrier, bytes);
  });
}

void store_box(const void* map, std::uint32_t source, const Coordinates& at, int rank) {
  const CUtensorMap& tensor = checked(map, source, rank);
  Machine::Pending& pending = Machine::get().bulk_stores();
  ++pending.copies;
  Machine::get().later([=, tensor = tensor, &pending] {
    for_box(tensor, source, at, [&](std::uint32_t address, std::uint8_t* elements, std::uint32_t bytes) {
      if (elements != nullptr) std::memcpy(elements, Machine::get().shared_beside(address, bytes), bytes);
    });
    if (--pending.copies == 0) Machine::get().wake(pending.waiting);
  });
}

void await_stores() {
  Machine::Pending& pending = Machine::get().bulk_stores();
  while (pending.copies > 0) Machine::get().wait(pending.waiting, "stores of TMA");
}

}  // namespace dspattn::emulator
