#include "emulator/machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>

#include "emulator/device.h"
#include "emulator/fiber.h"
#include "emulator/tensor_core.h"

namespace dspattn::emulator {

struct Machine::Thread {
  Fiber fiber;
  bool live = false;
  const char* waits_for = nullptr;
  std::uint32_t detail = 0, detail2 = 0;
  Pending copies, stores;
};

struct Machine::Warp {
  int live = 0, arrived = 0;
  std::uint64_t generation = 0;
  const char* kind = nullptr;
  Together together = nullptr;
  std::array<std::uint64_t, kWarp> given{}, taken{};
  WaitList waiting;
};

struct Machine::Named {
  int arrived = 0, threads = 0;
  std::uint64_t generation = 0;
  WaitList waiting;
};

struct Machine::Mbarrier {
  int arrivals = 0, pending = 0;
  std::int64_t bytes = 0;
  unsigned phase = 0;
  WaitList waiting;
};

namespace {

constexpr int kMaxThreads = 4096;
constexpr int kMaxClusterBlocks = 16;
// No power of two: the ends of such stacks, where all the work is, would lie in the same few sets of the caches.
constexpr std::size_t kStackBytes = 256 * 1024 + 17 * 64;
constexpr int kNamedBarriers = 16;

std::uint64_t seed_of_environment() {
  const char* given = std::getenv("DSPATTN_EMULATOR_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : 1;
}

// Random numbers for a scheduler that draws one for every switch (the mixing function of SplitMix64).
struct Random {
  std::uint64_t state;

  unsigned below(unsigned bound) {
    std::uint64_t x = state += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return static_cast<unsigned>(((x >> 32) * bound) >> 32);
  }
};

}  // namespace

Capability capability() {
  static const Capability given = [] {
    const char* text = std::getenv("DSPATTN_EMULATOR_CAPABILITY");
    Capability parsed{9, 0};
    if (text != nullptr && std::sscanf(text, "%d.%d", &parsed.major, &parsed.minor) != 2) {
      throw std::runtime_error("DSPATTN_EMULATOR_CAPABILITY: expected major.minor, got " + std::string(text));
    }
    return parsed;
  }();
  return given;
}

struct Machine::State {
  std::uint8_t* stacks = nullptr;
  std::array<Thread, kMaxThreads> threads;
  std::vector<Warp> warps;
  std::vector<Named> named;  // kNamedBarriers of each block
  Named cluster;
  std::vector<int> block_live;  // threads of each block
  std::map<std::uint32_t, Mbarrier> mbarriers;
  std::vector<int> runnable;
  std::vector<std::function<void()>> events;
  Fiber host;  // that run_block() was called on
  std::exception_ptr error;
  const std::function<void()>* body = nullptr;
  int live = 0;
  Index block, first;
  Random random{seed_of_environment()};
  Pace pace = Pace::random;
};

Machine& Machine::create() {
  static thread_local Machine machine;  // tests launch from several threads
  current_ = &machine;
  return machine;
}

Machine::Machine() : state_(new State) {
  void* memory = mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("emulator: no memory for the threads' stacks");
  state_->stacks = static_cast<std::uint8_t*>(memory);
  shared_ = static_cast<std::uint8_t*>(std::aligned_alloc(2048, kMaxClusterBlocks * kRegionBytes + 2048)) +
            kSharedBase % 1024;
}

Machine::~Machine() {
  munmap(state_->stacks, kMaxThreads * kStackBytes);
  std::free(shared_ - kSharedBase % 1024);
  delete state_;
}

void Machine::require_hopper(const char* instruction) {
  if (capability().major < 9) fail(std::string(instruction) + " on a device that has none");
}

void Machine::fail(const std::string& message) { throw std::runtime_error("emulator: " + message); }

void Machine::fail_outside(std::uint32_t address) {
  fail("shared address " + std::to_string(address) + " is outside the block's memory");
}

void Machine::stored(std::uint32_t address, std::uint32_t bytes, int thread) {
  const std::uint32_t fences = fences_[static_cast<std::size_t>(thread)];
  for (std::size_t word = word_of(address); word <= word_of(address + bytes - 1); ++word)
    stores_[word] = {thread, fences};
}

std::uint8_t* Machine::shared_beside(std::uint32_t address, std::uint32_t bytes) {
  std::uint8_t* place = shared(address, bytes);
  for (std::size_t word = word_of(address); word <= word_of(address + bytes - 1); ++word) {
    const Store& store = stores_[word];
    if (store.thread >= 0 && store.fences == fences_[static_cast<std::size_t>(store.thread)]) {
      fail("what thread " + std::to_string(store.thread) + " stored at shared address " + std::to_string(address) +
           " is read by TMA or a tensor core without a fence");
    }
  }
  return place;
}

std::uint8_t* Machine::shared_written_beside(std::uint32_t address, std::uint32_t bytes) {
  std::uint8_t* place = shared(address, bytes);
  for (std::size_t word = word_of(address); word <= word_of(address + bytes - 1); ++word) stores_[word] = {};
  return place;
}

unsigned Machine::draw(unsigned below) { return state_->random.below(below); }

// A thread of a block from its begin to its end.
void Machine::run_thread() {
  Machine& machine = get();
  State& state = *machine.state_;
  Thread& thread = state.threads[static_cast<std::size_t>(machine.running_)];
  Warp& warp = state.warps[static_cast<std::size_t>(machine.running_ / kWarp)];
  try {
    (*state.body)();
    thread.live = false;
    --state.live;
    --state.block_live[static_cast<std::size_t>(machine.running_ / machine.block_threads_)];
    --warp.live;
    if (warp.live > 0 && warp.arrived == warp.live) machine.complete_exchange(warp);
    machine.check_cluster();
  } catch (...) {
    if (!state.error) state.error = std::current_exception();
  }
  const int next = machine.next_thread();
  machine.go_on(next);
  Fiber::change(thread.fiber, next < 0 ? state.host : state.threads[static_cast<std::size_t>(next)].fiber, true);
}

void Machine::run_cluster(Index grid, Index block, Index first, int blocks, std::uint32_t shared_bytes,
                          const std::function<void()>& body) {
  State& state = *state_;
  blocks_ = static_cast<std::uint32_t>(blocks);
  block_threads_ = static_cast<int>(block.x * block.y * block.z);
  const int threads = blocks * block_threads_;
  if (blocks > kMaxClusterBlocks || threads > kMaxThreads) fail("a cluster of " + std::to_string(threads) + " threads");
  if (blocks > 1 && block_threads_ % kWarp != 0) fail("a cluster of blocks that are no whole warps");
  if (blocks > 1) require_hopper("a cluster");
  if (shared_bytes > kSharedBytes) fail("a block asks for " + std::to_string(shared_bytes) + " bytes of shared memory");
  dynamic_bytes_ = shared_bytes;
  shared_end_ = kSharedBase + shared_bytes;
  state.block = block;
  state.first = first;
  std::memset(shared_, 0xCB, blocks_ * kRegionBytes);  // fp16, bf16 and fp32 of this are finite, far from 0
  stores_.assign(blocks_ * kRegionBytes / 4, {});
  fences_.assign(static_cast<std::size_t>(threads), 0);
  counts_.clear();
  state.warps.assign(static_cast<std::size_t>((threads + kWarp - 1) / kWarp), {});
  state.named.assign(blocks_ * kNamedBarriers, {});
  state.cluster = {};
  state.block_live.assign(blocks_, block_threads_);
  state.mbarriers.clear();
  state.runnable.clear();
  state.events.clear();
  state.error = nullptr;
  state.body = &body;
  state.live = threads;
  state.pace = static_cast<Pace>(draw(3));
  reset_tensor_core(threads);
  gridDim = grid;
  blockDim = block;
  for (int i = 0; i < threads; ++i) {
    Thread& thread = state.threads[static_cast<std::size_t>(i)];
    thread.live = true;
    thread.waits_for = nullptr;
    thread.copies = {};
    thread.stores = {};
    thread.fiber.prepare(state.stacks + static_cast<std::size_t>(i) * kStackBytes, kStackBytes, &Machine::run_thread);
    ++state.warps[static_cast<std::size_t>(i / kWarp)].live;
    state.runnable.push_back(i);
  }
  if (const int first = next_thread(); first >= 0) {
    go_on(first);
    Fiber::change(state.host, state.threads[static_cast<std::size_t>(first)].fiber);
  }
  if (state.error) std::rethrow_exception(state.error);
  if (state.live > 0) fail("the block hangs:\n" + hang_report());  // or the cluster
  for (const auto& [address, barrier] : state.mbarriers) {
    if (barrier.bytes != 0) fail("bytes are still on their way to mbarrier " + std::to_string(address));
  }
}

std::string Machine::hang_report() const {
  std::map<std::string, std::vector<int>> by_reason;
  for (std::size_t i = 0; i < state_->threads.size(); ++i) {
    const Thread& thread = state_->threads[i];
    if (!thread.live) continue;
    const std::string reason =
        std::string(thread.waits_for) + " " + std::to_string(thread.detail) + " " + std::to_string(thread.detail2);
    by_reason[reason].push_back(static_cast<int>(i));
  }
  std::string report;
  for (const auto& [reason, threads] : by_reason) {
    report += "  " + std::to_string(threads.size()) + " threads from " + std::to_string(threads.front()) + " to " +
              std::to_string(threads.back()) + " wait for " + reason + "\n";
  }
  return report;
}

// Lets events happen until it is a thread's turn: which, or -1 when no thread can go on or something failed.
int Machine::next_thread() {
  State& state = *state_;
  while (!state.error) {
    const bool can_run = !state.runnable.empty();
    try {
      if (!state.events.empty() &&
          (!can_run || state.pace == Pace::eager || (state.pace == Pace::random && draw(16) == 0))) {
        happen(draw(static_cast<unsigned>(state.events.size())));
        continue;
      }
      if (!can_run) {
        if (advance_tensor_core()) continue;
        break;
      }
      if (state.pace == Pace::eager || (state.pace == Pace::random && draw(16) == 0)) advance_tensor_core();
    } catch (...) {
      state.error = std::current_exception();
      break;
    }
    const auto at = static_cast<std::size_t>(draw(static_cast<unsigned>(state.runnable.size())));
    const int thread = state.runnable[at];
    state.runnable[at] = state.runnable.back();
    state.runnable.pop_back();
    return thread;
  }
  return -1;
}

void Machine::go_on(int thread) {
  running_ = thread;
  if (thread < 0) return;
  const auto x = static_cast<unsigned>(thread % block_threads_);
  const Index block = state_->block;
  blockIdx = {state_->first.x + static_cast<unsigned>(thread / block_threads_), state_->first.y, state_->first.z};
  threadIdx = {x % block.x, x / block.x % block.y, x / block.x / block.y};
}

void Machine::switch_out() {
  const int self = running_;
  const int next = next_thread();
  if (next == self) return;
  go_on(next);
  auto& threads = state_->threads;
  Fiber::change(threads[static_cast<std::size_t>(self)].fiber,
                next < 0 ? state_->host : threads[static_cast<std::size_t>(next)].fiber);
}

void Machine::wait(WaitList& list, const char* what, std::uint32_t detail, std::uint32_t detail2) {
  Thread& thread = state_->threads[static_cast<std::size_t>(running_)];
  thread.waits_for = what;
  thread.detail = detail;
  thread.detail2 = detail2;
  list.push_back(running_);
  switch_out();
}

void Machine::wake(WaitList& list) {
  state_->runnable.insert(state_->runnable.end(), list.begin(), list.end());
  list.clear();
}

void Machine::later(std::function<void()> event) { state_->events.push_back(std::move(event)); }

void Machine::happen(std::size_t event) {
  std::function<void()> chosen = std::move(state_->events[event]);
  state_->events[event] = std::move(state_->events.back());
  state_->events.pop_back();
  chosen();
}

const std::array<std::uint64_t, kWarp>& Machine::exchange(std::uint64_t value, const char* kind, Together together) {
  Warp& warp = state_->warps[static_cast<std::size_t>(running_ / kWarp)];
  if (warp.arrived > 0 && warp.kind != kind && std::strcmp(warp.kind, kind) != 0) {
    fail("lanes of warp " + std::to_string(running_ / kWarp) + " meet at " + warp.kind + " and at " + kind);
  }
  warp.kind = kind;
  warp.together = together;
  warp.given[static_cast<std::size_t>(running_ % kWarp)] = value;
  ++warp.arrived;
  const std::uint64_t generation = warp.generation;
  if (warp.arrived == warp.live) {
    complete_exchange(warp);
  } else {
    while (warp.generation == generation) wait(warp.waiting, kind);
  }
  return warp.taken;
}

void Machine::complete_exchange(Warp& warp) {
  if (warp.together != nullptr) {
    if (warp.live < kWarp) fail(std::string(warp.kind) + " by part of a warp");
    warp.together(warp.given);
  }
  warp.arrived = 0;
  ++warp.generation;
  warp.taken = warp.given;
  wake(warp.waiting);
}

void Machine::cluster_sync() {
  Named& all = state_->cluster;
  const std::uint64_t generation = all.generation;
  ++all.arrived;
  check_cluster();
  while (all.generation == generation) wait(all.waiting, "the cluster");
}

void Machine::check_cluster() {
  Named& all = state_->cluster;
  if (all.arrived == 0 || all.arrived < state_->live) return;
  all.arrived = 0;
  ++all.generation;
  wake(all.waiting);
}

void Machine::barrier(int id, int threads, bool waits) {
  Named& named = state_->named[static_cast<std::size_t>(running_ / block_threads_ * kNamedBarriers + id)];
  if (named.arrived > 0 && named.threads != threads) {
    fail("barrier " + std::to_string(id) + " of " + std::to_string(named.threads) + " threads is used for " +
         std::to_string(threads));
  }
  named.threads = threads;
  const std::uint64_t generation = named.generation;
  if (++named.arrived == threads) {
    named.arrived = 0;
    ++named.generation;
    wake(named.waiting);
  } else if (waits) {
    while (named.generation == generation) wait(named.waiting, "barrier", static_cast<std::uint32_t>(id));
  }
}

std::uint8_t* Machine::dynamic_shared(std::uint32_t alignment) {
  std::uint32_t begin = (kSharedBase + alignment - 1) / alignment * alignment;
  if (begin % (2 * alignment) == 0) begin += alignment;
  shared_end_ = begin + dynamic_bytes_;
  return shared_ + block_of(window()) * kRegionBytes + (begin - kSharedBase);
}

std::uint32_t Machine::address_of(const void* pointer) const {
  const auto offset = static_cast<const std::uint8_t*>(pointer) - (shared_ + block_of(window()) * kRegionBytes);
  if (offset < 0 || offset > shared_end_ - kSharedBase) fail("a pointer that is not to the block's shared memory");
  return window() | (kSharedBase + static_cast<std::uint32_t>(offset));
}

Machine::Mbarrier& Machine::mbarrier_at(std::uint32_t address) {
  const auto found = state_->mbarriers.find(address);
  if (found == state_->mbarriers.end()) fail("no mbarrier was initialised at " + std::to_string(address));
  return found->second;
}

// Who ends leaves its shared memory: nobody may arrive or deliver there.
void Machine::check_live(std::uint32_t address) const {
  if (state_->block_live[block_of(address)] == 0) {
    fail("mbarrier " + std::to_string(address) + " is used after its block has ended");
  }
}

void Machine::mbarrier_init(std::uint32_t address, int arrivals) {
  if (address % 8 != 0) fail("an mbarrier that is not aligned");
  shared(address, 8);
  const auto [place, fresh] = state_->mbarriers.try_emplace(address);
  if (!fresh) fail("an mbarrier is initialised twice");
  place->second.arrivals = place->second.pending = arrivals;
}

void Machine::check_phase(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
  wake(barrier.waiting);
}

void Machine::mbarrier_arrive(std::uint32_t address, std::int64_t expected_bytes) {
  Mbarrier& barrier = mbarrier_at(address);
  check_live(address);
  barrier.bytes += expected_bytes;
  if (barrier.pending == 0) fail("more arrivals than mbarrier " + std::to_string(address) + " was initialised for");
  --barrier.pending;
  check_phase(barrier);
}

void Machine::mbarrier_delivered(std::uint32_t address, std::int64_t bytes) {
  Mbarrier& barrier = mbarrier_at(address);
  check_live(address);
  barrier.bytes -= bytes;
  // In a cluster another block's copy may arrive before this one's thread has announced it.
  if (barrier.bytes < 0 && (blocks_ == 1 || barrier.pending == 0))
    fail("more bytes than mbarrier " + std::to_string(address) + " was told to expect");
  check_phase(barrier);
}

bool Machine::mbarrier_done(std::uint32_t address, int parity) {
  return static_cast<int>(mbarrier_at(address).phase & 1) != parity;
}

void Machine::mbarrier_wait(std::uint32_t address, int parity) {
  if (parity != 0 && parity != 1) fail("a parity of " + std::to_string(parity));
  while (!mbarrier_done(address, parity)) {
    wait(mbarrier_at(address).waiting, "mbarrier (address, parity)", address, static_cast<std::uint32_t>(parity));
  }
}

Machine::Pending& Machine::async_copies() { return state_->threads[static_cast<std::size_t>(running_)].copies; }
Machine::Pending& Machine::bulk_stores() { return state_->threads[static_cast<std::size_t>(running_)].stores; }

}  // namespace dspattn::emulator
