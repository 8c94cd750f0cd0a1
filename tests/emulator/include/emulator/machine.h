// One streaming multiprocessor, emulated: the threads of a block as fibers on one host thread, and what happens beside
// them (copies, tensor-core products) as a list of events.
//
// Which fiber goes on next, and when an event happens, is drawn at random within what the hardware promises, so that a
// kernel that relies on more than it was promised goes wrong here. When nothing can go on the block is hung: launch()
// throws and says what each warp waits for.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace dspattn::emulator {

inline constexpr int kWarp = 32;
inline constexpr int kWarpgroup = 128;

// Where shared memory begins, as an address, for blocks that ask for an alignment of 16 bytes: no better.
inline constexpr std::uint32_t kSharedBase = 1024 + 16;
inline constexpr std::uint32_t kSharedBytes = 227 * 1024;
// Blocks of a cluster see each other's shared memory; the upper bits of an address tell whose it is.
inline constexpr int kMaxBlocks = 2;
inline constexpr int kWindowBits = 24;
// The same place in block `rank` of the cluster.
constexpr std::uint32_t in_block(std::uint32_t address, std::uint32_t rank) {
  return (address & ((1u << kWindowBits) - 1)) | rank << kWindowBits;
}

// What the emulated device presents itself as: 9.0, or what DSPATTN_EMULATOR_CAPABILITY says (8.0).
struct Capability {
  int major, minor;
};
Capability capability();

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Threads that wait for something to change.
using WaitList = std::vector<int>;

// How soon events happen: as soon as they can, only when no thread can go on, or anything between.
enum class Pace : std::uint8_t { eager, lazy, random };

class Machine {
 public:
  static Machine& get() { return current_ != nullptr ? *current_ : create(); }

  // Runs the blocks of a cluster, often just one, to their end; throws when they hang or break a rule of the hardware.
  // They follow each other along x, from `first` on.
  void run_cluster(Index grid, Index block, Index first, int blocks, std::uint32_t shared_bytes,
                   const std::function<void()>& body);

  // Everything below is called by the running thread of a block.
  int thread() const { return running_; }  // counted through the blocks of a cluster
  std::uint32_t window() const { return static_cast<std::uint32_t>(running_ / block_threads_) << kWindowBits; }
  std::uint8_t* shared(std::uint32_t address, std::uint32_t bytes) {
    const std::uint32_t within = address & kWithin;
    if (within < kSharedBase || within + bytes > shared_end_ || block_of(address) >= blocks_) fail_outside(address);
    return shared_ + block_of(address) * kRegionBytes + (within - kSharedBase);
  }
  std::uint32_t address_of(const void* pointer) const;
  // What threads store to shared memory TMA and the tensor cores see only behind a fence of the thread that
  // stored it. Stores through plain pointers are not followed.
  void stored(std::uint32_t address, std::uint32_t bytes, int thread);
  void fence() { ++fences_[static_cast<std::size_t>(running_)]; }
  // Or behind one of a thread that has seen these stores: taken to have seen all there were.
  void fence_seen() {
    for (std::uint32_t& fences : fences_) ++fences;
  }
  std::uint8_t* shared_beside(std::uint32_t address, std::uint32_t bytes);  // read by the engine or a tensor core
  std::uint8_t* shared_written_beside(std::uint32_t address, std::uint32_t bytes);  // written by the engine

  // The block's dynamic shared memory, for a kernel that asks for this alignment: no better than it.
  std::uint8_t* dynamic_shared(std::uint32_t alignment);

  // Lets others go on until `list` is woken. `what` is what a report of a hang says.
  void wait(WaitList& list, const char* what, std::uint32_t detail = 0, std::uint32_t detail2 = 0);
  void wake(WaitList& list);
  // Those that wait for a count in global memory (cuda/ptx/ordered_sums.h).
  WaitList& counts() { return counts_; }

  // An event to happen at some later time.
  void later(std::function<void()> event);

  // All lanes of the warp that have not ended exchange a value; `kind` must be the same in all.
  using Together = void (*)(const std::array<std::uint64_t, kWarp>& given);
  // `together` is called once, when all 32 lanes are there and before any goes on.
  const std::array<std::uint64_t, kWarp>& exchange(std::uint64_t value, const char* kind, Together together = nullptr);

  // All threads of the cluster that have not ended.
  void cluster_sync();

  // Barriers of a block by number. Every thread counts.
  void barrier(int id, int threads, bool wait);

  // mbarrier objects.
  void mbarrier_init(std::uint32_t address, int arrivals);
  void mbarrier_arrive(std::uint32_t address, std::int64_t expected_bytes = 0);
  void mbarrier_delivered(std::uint32_t address, std::int64_t bytes);
  bool mbarrier_done(std::uint32_t address, int parity);
  void mbarrier_wait(std::uint32_t address, int parity);

  // Counts of this thread's asynchronous copies that have not happened.
  struct Pending {
    int copies = 0;
    std::size_t committed = 0;            // groups of copies
    std::vector<int> groups;              // copies of each, and of the group that is not committed
    std::vector<std::uint32_t> arrivals;  // mbarriers to arrive at when there are none
    WaitList waiting;
  };
  Pending& async_copies();  // cp.async
  Pending& bulk_stores();   // committed or not

  static void require_hopper(const char* instruction);
  [[noreturn]] static void fail(const std::string& message);

 private:
  static constexpr std::uint32_t kWithin = (1u << kWindowBits) - 1;
  static constexpr std::uint32_t kRegionBytes = (kSharedBytes + 3 * 1024 + 2047) / 2048 * 2048;  // of a block
  static std::uint32_t block_of(std::uint32_t address) { return address >> kWindowBits; }
  static std::size_t word_of(std::uint32_t address) {
    return (block_of(address) * kRegionBytes + (address & kWithin) - kSharedBase / 4 * 4) / 4;
  }

  struct Thread;
  struct Warp;
  struct Named;
  struct Mbarrier;

  Machine();
  ~Machine();
  static Machine& create();
  [[noreturn]] static void fail_outside(std::uint32_t address);
  static void run_thread();
  int next_thread();
  void go_on(int thread);
  void switch_out();
  void happen(std::size_t event);
  void complete_exchange(Warp& warp);
  void check_cluster();
  void check_live(std::uint32_t address) const;
  void check_phase(Mbarrier& barrier);
  Mbarrier& mbarrier_at(std::uint32_t address);
  std::string hang_report() const;
  unsigned draw(unsigned below);

  struct State;
  State* state_;
  int running_ = -1;
  std::uint8_t* shared_ = nullptr;  // host memory whose address modulo 1024 is that of the emulated one
  std::uint32_t dynamic_bytes_ = 0, shared_end_ = 0;  // of every block
  std::uint32_t blocks_ = 1;                          // of the cluster
  int block_threads_ = kWarp;
  struct Store {
    int thread = -1;  // none
    std::uint32_t fences = 0;
  };
  std::vector<Store> stores_;          // the last one to every word of shared memory
  std::vector<std::uint32_t> fences_;  // of every thread
  WaitList counts_;
  static inline constinit thread_local Machine* current_ = nullptr;
};

}  // namespace dspattn::emulator
