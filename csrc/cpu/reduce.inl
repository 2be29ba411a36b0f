// Sums of a block of task vectors in float64: sixteen interleaved sums, added in order.
//
// Included after consensus.inl. A block begins at a multiple of its size in its row or group, so that the order of
// additions depends on nothing else.

template <class Term>
void add_lanes(double* sums, std::int64_t n, Term term) {
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
        for (std::int64_t lane = 0; lane < lanes; ++lane) sums[lane] += term(i + lane);
    for (std::int64_t lane = 0; i + lane < n; ++lane) sums[lane] += term(i + lane);
}

inline double add_up(const double* sums) {
    double total = sums[0];
    for (std::int64_t lane = 1; lane < lanes; ++lane) total += sums[lane];
    return total;
}

inline void gram(const Range& range, bool based, double* sums) {
    with_task_types(range, [&](auto stored, auto computed) {
        using C = decltype(computed);
        Tasks<decltype(stored), C> tasks(range, based);
        const std::size_t models = tasks.models();
        std::vector<double> interleaved(models * models * lanes);
        for (std::int64_t begin = range.begin, n; begin < range.end; begin += n) {
            n = std::min(chunk, range.end - begin);
            tasks.read(begin, n);
            tasks.load(0, n, nullptr, nullptr);
            for (std::size_t j = 0; j < models; ++j)
                for (std::size_t k = 0; k <= j; ++k) {
                    const C *x = tasks.t[j], *y = tasks.t[k];
                    add_lanes(&interleaved[(j * models + k) * lanes], n,
                              [&](std::int64_t i) { return static_cast<double>(x[i]) * static_cast<double>(y[i]); });
                }
        }
        for (std::size_t j = 0; j < models; ++j)
            for (std::size_t k = 0; k <= j; ++k) sums[j * models + k] = add_up(&interleaved[(j * models + k) * lanes]);
    });
}

inline void l1(const Range& range, const Plan& plan, std::size_t row, double* sums) {
    with_task_types(range, [&](auto stored, auto computed) {
        using S = decltype(stored);
        using C = decltype(computed);
        Plan unscaled = plan;
        unscaled.rescale = nullptr;
        unscaled.random.inverse = false;
        Tasks<S, C> tasks(range, plan.based);
        Survivors<S, C> survivors(range, unscaled, row);
        const std::size_t models = tasks.models();
        std::vector<double> interleaved(models * 2 * lanes);
        const auto add = [&](std::size_t sum, const C* t, std::int64_t n) {
            add_lanes(&interleaved[sum * lanes], n,
                      [&](std::int64_t i) { return std::abs(static_cast<double>(t[i])); });
        };
        for (std::int64_t begin = range.begin, n; begin < range.end; begin += n) {
            n = std::min(chunk, range.end - begin);
            tasks.read(begin, n);
            tasks.load(0, n, nullptr, nullptr);
            survivors.load(begin, n);
            for (std::size_t k = 0; k < models; ++k) {
                add(2 * k, tasks.t[k], n);
                add(2 * k + 1, survivors.tasks.t[k], n);
            }
        }
        for (std::size_t sum = 0; sum < 2 * models; ++sum) sums[sum] = add_up(&interleaved[sum * lanes]);
    });
}
