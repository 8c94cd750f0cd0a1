#include "emulator/fiber.h"

#include <cstdint>
#include <cstdlib>

// GCC and clang say differently which sanitizer is on.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DSPATTN_ASAN
#endif
#if __has_feature(thread_sanitizer)
#define DSPATTN_TSAN
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define DSPATTN_ASAN
#endif
#if defined(__SANITIZE_THREAD__)
#define DSPATTN_TSAN
#endif
#if defined(DSPATTN_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(DSPATTN_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

// dspattn_change_stack(place for the old stack pointer, new stack pointer): keeps the registers that a called function
// must keep on the old stack, takes them from the new one, and returns there.
#if defined(__x86_64__)
asm(R"(
.text
.globl dspattn_change_stack
.type dspattn_change_stack, @function
dspattn_change_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size dspattn_change_stack, . - dspattn_change_stack
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl dspattn_change_stack
.type dspattn_change_stack, %function
dspattn_change_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size dspattn_change_stack, . - dspattn_change_stack
)");
#endif

#if !defined(DSPATTN_FIBERS_BY_UCONTEXT)
extern "C" void dspattn_change_stack(void** old_stack_pointer, void* new_stack_pointer);
#endif

namespace dspattn::emulator {
namespace {

thread_local Fiber* running = nullptr;  // the one that is switched to
#if defined(DSPATTN_ASAN)
thread_local Fiber* left = nullptr;  // and the one that was left for it
#endif

}  // namespace

// The first function on a prepared stack.
void Fiber::begin() {
  running->arrived();
  running->entry_();
  std::abort();
}

void Fiber::prepare(void* stack, std::size_t bytes, void (*entry)()) {
  entry_ = entry;
  stack_ = stack;
  bytes_ = bytes;
#if defined(DSPATTN_FIBERS_BY_UCONTEXT)
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = bytes;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::begin, 0);
#else
#if defined(DSPATTN_ASAN)
  ASAN_UNPOISON_MEMORY_REGION(stack, bytes);  // frames of a fiber that never ended
  state_ = nullptr;
#endif
  // What dspattn_change_stack finds: kept registers of zero, and begin() to return to.
  const auto top = (reinterpret_cast<std::uintptr_t>(stack) + bytes) & ~std::uintptr_t{15};
  auto** words = reinterpret_cast<void**>(top);
#if defined(__x86_64__)
  constexpr int kWords = 8, kReturn = 6;  // and a word that would be begin()'s own return address
#else
  constexpr int kWords = 20, kReturn = 11;
#endif
  words -= kWords;
  for (int i = 0; i < kWords; ++i) words[i] = nullptr;
  words[kReturn] = reinterpret_cast<void*>(&Fiber::begin);
  stack_pointer_ = words;
#endif
#if defined(DSPATTN_TSAN)
  if (state_ != nullptr) __tsan_destroy_fiber(state_);  // with the calls it never returned from
  state_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(DSPATTN_TSAN)
  if (entry_ != nullptr) __tsan_destroy_fiber(state_);
#endif
}

void Fiber::arrived() {
#if defined(DSPATTN_ASAN)
  __sanitizer_finish_switch_fiber(state_, &left->stack_, &left->bytes_);
#endif
}

void Fiber::change(Fiber& from, Fiber& to, [[maybe_unused]] bool ended) {
  running = &to;
#if defined(DSPATTN_ASAN)
  left = &from;
  __sanitizer_start_switch_fiber(ended ? nullptr : &from.state_, to.stack_, to.bytes_);
#endif
#if defined(DSPATTN_TSAN)
  if (from.entry_ == nullptr) from.state_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.state_, 0);
#endif
#if defined(DSPATTN_FIBERS_BY_UCONTEXT)
  swapcontext(&from.context_, &to.context_);
#else
  dspattn_change_stack(&from.stack_pointer_, to.stack_pointer_);
#endif
  from.arrived();
}

}  // namespace dspattn::emulator
