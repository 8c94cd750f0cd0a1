// The floating-point environment that CPU kernels compute in, whatever the calling thread's is.
#pragma once

#include <cfenv>

namespace dspattn::cpu {

// Rounding to nearest, subnormal numbers as they are, no traps, for the lifetime of the object; then the thread's own
// environment again. Programs set theirs for one thread (torch.set_flush_denormal): a result that took it over would
// depend on how the work is shared out among threads.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&own_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&own_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t own_;
};

}  // namespace dspattn::cpu
