// Deals linear assignment problems out to threads.

#include <algorithm>
#include <atomic>
#include <numeric>

#include "loops.h"
#include "parallel.h"

namespace isthmus::cpu {

std::vector<Assignment> assign(const std::vector<Problem>& problems, int threads) {
    const auto loop = loops().assign;
    // The largest first, so that none is left to one thread at the end.
    std::vector<std::size_t> order(problems.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto size = [&](std::size_t k) { return problems[k].rows * problems[k].cols; };
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return size(a) > size(b); });
    std::int64_t work = 0;
    for (std::size_t k = 0; k < problems.size(); ++k) work += size(k) * problems[k].rows;
    std::vector<Assignment> results(problems.size());
    std::atomic<std::size_t> taken{0};
    const auto next = [&] {
        const std::size_t place = taken.fetch_add(1, std::memory_order_relaxed);
        return place < order.size() ? order[place] : order.size();
    };
    const auto parts = static_cast<std::int64_t>(problems.size());
    run_parallel(useful_threads(work, static_cast<int>(std::min<std::int64_t>(threads, parts))),
                 [&](int) { loop(problems, next, results); });
    return results;
}

}  // namespace isthmus::cpu
