// Element-wise rules over a table: how the work is split between threads and how outputs are written.

#include <algorithm>
#include <atomic>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "loops.h"
#include "parallel.h"

namespace isthmus::cpu {

namespace {

constexpr std::int64_t parallel_bytes = 1 << 20;  // below this, waking other threads costs more than it saves
constexpr std::int64_t stream_bytes = 1 << 24;    // above this, outputs would only push useful data out of the caches
constexpr std::int64_t grain = 1024;              // elements: threads share no cache line of an output

std::atomic<bool> forked{false};

#if defined(__unix__) || defined(__APPLE__)
[[maybe_unused]] const int watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

// Split the elements of all rows evenly between threads and give each its ranges, in order.
template <class Body>
void for_ranges(const Table& table, int threads, Body body) {
    std::int64_t elements = 0, moved = 0, written = 0;
    bool in_place = false;
    for (std::size_t r = 0; r < table.rows(); ++r) {
        const Operand *inputs = table.row(r), *out = inputs + table.inputs;
        elements += table.numel[r];
        written += table.numel[r] * size_of(out->dtype);
        for (const Operand* x = inputs; x != out; ++x) {
            moved += table.numel[r] * size_of(x->dtype);
            in_place |= x->address == out->address;
        }
    }
    threads = useful_threads(moved + written, threads);
    const bool stream = written >= stream_bytes && !in_place;
    run_parallel(threads, [&](int k) {
        const std::int64_t from = elements / threads * k + std::min<std::int64_t>(elements % threads, k);
        const std::int64_t to = elements / threads * (k + 1) + std::min<std::int64_t>(elements % threads, k + 1);
        const auto cut = [&](std::int64_t at, std::int64_t numel) {
            return at >= numel ? numel : std::max<std::int64_t>(at, 0) / grain * grain;
        };
        std::int64_t row_start = 0;
        for (std::size_t r = 0; r < table.rows() && row_start < to; row_start += table.numel[r++]) {
            const std::int64_t begin = cut(from - row_start, table.numel[r]), end = cut(to - row_start, table.numel[r]);
            if (begin < end) body(Range{table.row(r), table.inputs, begin, end, stream});
        }
#if defined(__x86_64__)
        if (stream) _mm_sfence();
#endif
    });
}

}  // namespace

int useful_threads(std::int64_t bytes, int wanted) {
    return bytes < parallel_bytes || forked.load(std::memory_order_relaxed) ? 1 : wanted;
}

void lerp(const Table& table, double weight, int threads) {
    const auto loop = loops().lerp;
    for_ranges(table, threads, [&](const Range& range) { loop(range, weight); });
}

void weighted_sum(const Table& table, const std::vector<double>& weights, int threads) {
    const auto loop = loops().weighted_sum;
    for_ranges(table, threads, [&](const Range& range) { loop(range, weights.data()); });
}

bool has_openmp() {
#if defined(_OPENMP)
    return true;
#else
    return false;
#endif
}

}  // namespace isthmus::cpu
