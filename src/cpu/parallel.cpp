#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/float_environment.h"

namespace dspattn::cpu {
namespace {

// One call of parallel_for. It lies on the caller's stack, so the caller leaves only when no worker is inside.
struct Loop {
  std::int64_t count = 0;
  const std::function<void(std::int64_t)>* body = nullptr;
  std::atomic<std::int64_t> next{0};
  int seats = 0;             // workers that may still join; guarded by the pool's mutex
  int inside = 0;            // workers at work; guarded by the pool's mutex
  std::exception_ptr error;  // guarded by the pool's mutex

  // Takes indices until there are none; returns what a call threw.
  std::exception_ptr work() {
    const DefaultFloatEnvironment environment;
    try {
      for (std::int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
           i = next.fetch_add(1, std::memory_order_relaxed)) {
        (*body)(i);
      }
    } catch (...) {
      next.store(count, std::memory_order_relaxed);
      return std::current_exception();
    }
    return nullptr;
  }
};

class Pool {
 public:
  void run(Loop& loop, int helpers) {
    {
      const std::lock_guard lock(mutex_);
      grow(helpers);
      loop.seats = helpers;
      loops_.push_back(&loop);
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    std::exception_ptr error = loop.work();
    std::unique_lock lock(mutex_);
    loops_.remove(&loop);
    left_.wait(lock, [&] { return loop.inside == 0; });
    if (!error) error = loop.error;
    lock.unlock();
    if (error) std::rethrow_exception(error);
  }

 private:
  // Workers are detached: the pool is never destroyed, and a process may end at any time without joining them. A system
  // that refuses a thread leaves the loop with fewer helpers, not without a result.
  void grow(int helpers) {
    try {
      for (; workers_ < helpers; ++workers_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Loop* loop = nullptr;
      wake_.wait(lock, [&] {
        const auto found = std::find_if(loops_.begin(), loops_.end(), [](const Loop* l) { return l->seats > 0; });
        loop = found == loops_.end() ? nullptr : *found;
        return loop != nullptr;
      });
      --loop->seats;
      ++loop->inside;
      lock.unlock();
      std::exception_ptr error = loop->work();
      lock.lock();
      if (error && !loop->error) loop->error = error;
      loop->seats = 0;  // nothing is left to take
      if (--loop->inside == 0) left_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable left_;
  std::list<Loop*> loops_;
  int workers_ = 0;
};

// A child process has none of its parent's threads, and perhaps a locked mutex: it starts a pool of its own. The old
// one is left alone, as are the workers of a process that ends.
std::atomic<Pool*>& pool_pointer() {
  static std::atomic<Pool*> pointer{[] {
    pthread_atfork(nullptr, nullptr, [] { pool_pointer().store(new Pool); });
    return new Pool;
  }()};
  return pointer;
}

// A loop on the caller's threads. The first error is kept: a team's work must not throw.
struct TeamLoop {
  Loop& loop;
  std::mutex mutex;
  std::exception_ptr error;  // guarded by the mutex
};

void run_on_team(const ThreadTeam& team, Loop& loop, int seats) {
  TeamLoop shared{loop, {}, nullptr};
  team.run(
      team.self, seats,
      [](void* pointer) {
        auto& mine = *static_cast<TeamLoop*>(pointer);
        const std::exception_ptr error = mine.loop.work();
        if (!error) return;
        const std::lock_guard lock(mine.mutex);
        if (!mine.error) mine.error = error;
      },
      &shared);
  if (shared.error) std::rethrow_exception(shared.error);
}

struct Free {
  void operator()(unsigned char* memory) const { std::free(memory); }
};

}  // namespace

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void parallel_for(std::int64_t count, const Execution& run, const std::function<void(std::int64_t)>& body) {
  const std::int64_t wanted = run.threads > 0 ? run.threads : available_cores();
  const int seats = static_cast<int>(std::min(wanted, count));
  if (seats <= 1) {
    const DefaultFloatEnvironment environment;
    for (std::int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Loop loop;
  loop.count = count;
  loop.body = &body;
  if (run.team.run != nullptr) {
    run_on_team(run.team, loop, seats);
  } else {
    pool_pointer().load()->run(loop, seats - 1);
  }
}

unsigned char* thread_scratch(std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;
  constexpr std::size_t kKept = std::size_t{4} << 20;  // a larger buffer is given back when a smaller one will do
  thread_local std::unique_ptr<unsigned char, Free> buffer;
  thread_local std::size_t size = 0;
  const std::size_t wanted = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (size < wanted || (size > kKept && wanted <= kKept)) {
    buffer.reset();
    size = 0;
    buffer.reset(static_cast<unsigned char*>(std::aligned_alloc(kAlignment, wanted)));
    if (!buffer) throw std::bad_alloc();
    size = wanted;
  }
  return buffer.get();
}

}  // namespace dspattn::cpu
