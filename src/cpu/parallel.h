// A parallel loop on a pool of threads that lives as long as the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "dspattn/attention.h"

namespace dspattn::cpu {

// Cores the process may run on (its affinity mask), at least 1.
int available_cores();

// Calls body(i) once for every i in [0, count), on up to run.threads threads (0: available_cores()) of run.team, or of
// the library's own pool where no team is given; the calling thread is one of them. Returns when all calls have
// returned. The first exception a call throws is rethrown here, after which no new call starts. May be called from
// several threads at once, and in a child after fork(); a body must not call it again. Every call of body, on any
// thread, sees the default floating-point environment (float_environment.h).
void parallel_for(std::int64_t count, const Execution& run, const std::function<void(std::int64_t)>& body);

// A buffer of at least `bytes` bytes, 64-byte aligned, that belongs to the calling thread and is reused by its next
// call. Contents are undefined. Throws std::bad_alloc.
unsigned char* thread_scratch(std::size_t bytes);

}  // namespace dspattn::cpu
