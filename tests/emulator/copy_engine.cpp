#include "emulator/copy_engine.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "cuda/ptx/single.h"
#include "emulator/machine.h"

namespace dspattn::emulator {
namespace {

// Calls visit(shared address, pointer to the tensor's element or null when it lies outside) for every element of a box.
template <typename Visit>
void for_box(const CUtensorMap& map, std::uint32_t shared, const Coordinates& at, Visit visit) {
  std::array<int, 5> count{1, 1, 1, 1, 1};
  for (int i = 0; i < map.rank; ++i) {
    count[std::size_t(i)] = (map.box[std::size_t(i)] + map.steps[std::size_t(i)] - 1) / map.steps[std::size_t(i)];
  }
  std::uint32_t offset = 0;
  std::array<int, 5> index{};
  for (index[4] = 0; index[4] < count[4]; ++index[4]) {
    for (index[3] = 0; index[3] < count[3]; ++index[3]) {
      for (index[2] = 0; index[2] < count[2]; ++index[2]) {
        for (index[1] = 0; index[1] < count[1]; ++index[1]) {
          for (index[0] = 0; index[0] < count[0]; ++index[0]) {
            bool inside = true;
            std::int64_t bytes = 0;
            for (std::size_t i = 0; i < std::size_t(map.rank); ++i) {
              const std::int64_t x = std::int64_t{at[i]} + std::int64_t{index[i]} * map.steps[i];
              inside = inside && x >= 0 && x < map.extents[i];
              bytes += x * (i == 0 ? map.element_bytes : map.strides[i - 1]);
            }
            std::uint32_t address = shared + offset;
            address ^= address >> 3 & 0x70;
            visit(address, inside ? static_cast<std::uint8_t*>(map.data) + bytes : nullptr);
            offset += static_cast<std::uint32_t>(map.element_bytes);
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
    for_box(tensor, destination, at, [&](std::uint32_t address, const std::uint8_t* element) {
      const auto size = static_cast<std::uint32_t>(tensor.element_bytes);
      std::uint8_t* to = Machine::get().shared_written_beside(address, size);
      if (element == nullptr) {
        std::memset(to, 0, size);
      } else if (tensor.rounds_to_tf32) {
        float value;
        std::memcpy(&value, element, 4);
        const std::uint32_t rounded = cuda::ptx::round_tf32(value);
        std::memcpy(to, &rounded, 4);
      } else {
        std::memcpy(to, element, size);
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
    for_box(tensor, source, at, [&](std::uint32_t address, std::uint8_t* element) {
      const auto size = static_cast<std::uint32_t>(tensor.element_bytes);
      if (element != nullptr) std::memcpy(element, Machine::get().shared_beside(address, size), size);
    });
    if (--pending.copies == 0) Machine::get().wake(pending.waiting);
  });
}

void await_stores() {
  Machine::Pending& pending = Machine::get().bulk_stores();
  while (pending.copies > 0) Machine::get().wait(pending.waiting, "stores of TMA");
}

}  // namespace dspattn::emulator
