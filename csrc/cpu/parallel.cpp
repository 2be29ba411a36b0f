// How many threads a call gets.

#include "parallel.h"

#include <atomic>
#include <cctype>
#include <cstdlib>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "api.h"

namespace isthmus::cpu {

namespace {

// Below so many bytes, calling other threads costs more than they save: far more where idle threads sleep.
std::int64_t parallel_bytes() {
    static const std::int64_t bytes = [] {
        const char* policy = std::getenv("OMP_WAIT_POLICY");
        const bool asleep = policy != nullptr && std::tolower(static_cast<unsigned char>(*policy)) == 'p';
        return asleep ? 1 << 22 : 1 << 20;
    }();
    return bytes;
}

std::atomic<bool> forked{false};

#if defined(__unix__) || defined(__APPLE__)
[[maybe_unused]] const int watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

}  // namespace

int useful_threads(std::int64_t bytes, int wanted) {
    return bytes < parallel_bytes() || forked.load(std::memory_order_relaxed) ? 1 : wanted;
}

bool has_openmp() {
#if defined(_OPENMP)
    return true;
#else
    return false;
#endif
}

}  // namespace isthmus::cpu
