// Stacks that run in turn on one host thread. A switch costs a few instructions: no system call, unlike swapcontext's.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(__aarch64__)
#define DSPATTN_FIBERS_BY_UCONTEXT
#include <ucontext.h>
#endif

namespace dspattn::emulator {

class Fiber {
 public:
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next switch to this fiber calls entry() on an empty stack. entry must not return.
  void prepare(void* stack, std::size_t bytes, void (*entry)());
  // Leaves the running fiber `from`, for good when it has `ended`, until some other switches back to it. A host
  // thread's own stack is a Fiber that was never prepared.
  static void change(Fiber& from, Fiber& to, bool ended = false);

 private:
  static void begin();
  void arrived();

#if defined(DSPATTN_FIBERS_BY_UCONTEXT)
  ucontext_t context_{};
#else
  void* stack_pointer_ = nullptr;
#endif
  void (*entry_)() = nullptr;
  // What sanitizers want to know.
  const void* stack_ = nullptr;
  std::size_t bytes_ = 0;
  void* state_ = nullptr;
};

}  // namespace dspattn::emulator
