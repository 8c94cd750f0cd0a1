// The parallel loop on the library's pool and on a caller's threads.
#include "cpu/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace dspattn::cpu {
namespace {

// A team that starts a thread per seat, and counts what it was asked for.
struct Team {
  std::atomic<int> seats{0};

  static void run(void* self, int seats, void (*work)(void* loop), void* loop) {
    static_cast<Team*>(self)->seats += seats;
    std::vector<std::thread> threads;
    for (int i = 0; i < seats; ++i) threads.emplace_back([=] { work(loop); });
    for (std::thread& thread : threads) thread.join();
  }
};

Execution on_team(Team& team, int threads) {
  Execution run;
  run.threads = threads;
  run.team = {Team::run, &team};
  return run;
}

void expect_every_index_once(const Execution& run) {
  std::vector<std::atomic<int>> calls(1000);
  parallel_for(1000, run, [&](std::int64_t i) { ++calls[static_cast<std::size_t>(i)]; });
  for (const std::atomic<int>& count : calls) EXPECT_EQ(count, 1);
}

TEST(Parallel, CallsEveryIndexOnceOnThePool) {
  Execution run;
  for (const int threads : {0, 1, 2, 5}) {
    run.threads = threads;
    expect_every_index_once(run);
  }
}

TEST(Parallel, CallsEveryIndexOnceOnTheCallersThreads) {
  Team team;
  expect_every_index_once(on_team(team, 3));
  EXPECT_EQ(team.seats, 3);
}

TEST(Parallel, TakesNoMoreSeatsThanThereIsWork) {
  Team team;
  parallel_for(2, on_team(team, 7), [](std::int64_t) {});
  EXPECT_EQ(team.seats, 2);
}

TEST(Parallel, WorksWhenTheSeatsAreServedOneAfterAnother) {
  Execution run;
  run.threads = 4;
  run.team.run = [](void*, int seats, void (*work)(void* loop), void* loop) {
    for (int i = 0; i < seats; ++i) work(loop);
  };
  expect_every_index_once(run);
}

TEST(Parallel, AnExceptionReachesTheCaller) {
  Team team;
  for (const Execution& run : {Execution{}, on_team(team, 3)}) {
    EXPECT_THROW(parallel_for(100, run,
                              [](std::int64_t i) {
                                if (i == 37) throw std::runtime_error("37");
                              }),
                 std::runtime_error);
  }
}

}  // namespace
}  // namespace dspattn::cpu
