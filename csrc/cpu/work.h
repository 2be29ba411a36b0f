// How work over a table is split between threads, and which outputs are written past the caches.
#pragma once

#include <algorithm>

#include "loops.h"
#include "parallel.h"

namespace isthmus::cpu {

constexpr std::int64_t stream_bytes = 1 << 24;  // above this, outputs would only push useful data out of the caches
constexpr std::int64_t grain = 1024;            // elements or bytes: threads share no cache line of an output

// Whether an output is also an input. Empty tensors have no address of their own.
inline bool in_place(const Table& table) {
    for (std::size_t r = 0; r < table.rows(); ++r)
        for (const Operand* x = table.row(r); x != table.row(r + 1); ++x)
            if (table.numel[r] > 0 && x->address == table.outputs[r].address) return true;
    return false;
}

// Split rows of so many elements, or bytes, evenly between threads: body(row, begin, end, thread) for each part of a
// row, in order.
template <class Body>
void for_shares(const std::vector<std::int64_t>& sizes, int threads, Body body) {
    std::int64_t total = 0;
    for (const std::int64_t size : sizes) total += size;
    run_parallel(threads, [&](int k) {
        const std::int64_t from = total / threads * k + std::min<std::int64_t>(total % threads, k);
        const std::int64_t to = total / threads * (k + 1) + std::min<std::int64_t>(total % threads, k + 1);
        const auto cut = [&](std::int64_t at, std::int64_t size) {
            return at >= size ? size : std::max<std::int64_t>(at, 0) / grain * grain;
        };
        std::int64_t row_start = 0;
        for (std::size_t r = 0; r < sizes.size() && row_start < to; row_start += sizes[r++]) {
            const std::int64_t begin = cut(from - row_start, sizes[r]), end = cut(to - row_start, sizes[r]);
            if (begin < end) body(r, begin, end, k);
        }
#if defined(__x86_64__)
        _mm_sfence();  // of what was written past the caches
#endif
    });
}

// Split the elements of all rows evenly between threads: body(range, row, thread) for each range, in order.
template <class Body>
void for_ranges(const Table& table, int threads, Body body) {
    std::int64_t read = 0, written = 0;
    for (std::size_t r = 0; r < table.rows(); ++r) {
        written += table.numel[r] * size_of(table.outputs[r].dtype);
        for (const Operand* x = table.row(r); x != table.row(r + 1); ++x) read += table.numel[r] * size_of(x->dtype);
    }
    threads = useful_threads(read + written, threads);
    const bool stream = written >= stream_bytes && !in_place(table);
    for_shares(table.numel, threads, [&](std::size_t r, std::int64_t begin, std::int64_t end, int k) {
        body(Range{table.row(r), table.width, table.outputs[r], begin, end, stream}, r, k);
    });
}

// The first group of each row, where rows have groups of `lengths`.
inline std::vector<std::int64_t> first_groups(const Table& table, const std::int64_t* lengths) {
    std::vector<std::int64_t> first(table.rows());
    for (std::size_t r = 1; r < table.rows(); ++r)
        first[r] =
            first[r - 1] + (lengths != nullptr ? table.numel[r - 1] / std::max<std::int64_t>(lengths[r - 1], 1) : 1);
    return first;
}

}  // namespace isthmus::cpu
