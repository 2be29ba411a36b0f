// Threads: how many a call gets, and the floating-point environment that each works in.
#pragma once

#include <cstdint>
#include <exception>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace isthmus::cpu {

// The default floating-point environment (round to nearest, subnormals kept) for the life of the object. Without it a
// thread that flushes subnormals would compute its part of a result differently from its neighbours.
class DefaultFloatEnvironment {
#if defined(__x86_64__)
   public:
    DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

   private:
    unsigned saved_;
#endif
};

// How many of the `wanted` threads a call that moves so many bytes uses. One where the work is small, and always one in
// a forked child: the OpenMP pool of the parent does not survive a fork, and waiting for its threads would hang.
int useful_threads(std::int64_t bytes, int wanted);

// Run task(k) for k = 0 .. threads-1 at once, each in the default floating-point environment. An exception, such as a
// failed allocation, must not leave the parallel region: the first is thrown again after it.
template <class Task>
void run_parallel(int threads, Task task) {
#if defined(_OPENMP)
    if (threads > 1) {
        std::exception_ptr failure;
#pragma omp parallel num_threads(threads)
        {
            const DefaultFloatEnvironment environment;
            try {
                // The runtime may grant fewer threads than asked for; every part is still done, once.
                for (int k = omp_get_thread_num(); k < threads; k += omp_get_num_threads()) task(k);
            } catch (...) {
#pragma omp critical(isthmus_failure)
                if (!failure) failure = std::current_exception();
            }
        }
        if (failure) std::rethrow_exception(failure);
        return;
    }
#endif
    const DefaultFloatEnvironment environment;
    for (int k = 0; k < threads; ++k) task(k);
}

}  // namespace isthmus::cpu
