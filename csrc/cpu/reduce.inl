// Sums of a block of task vectors in float64: sixteen interleaved sums, added in order.
//
// Included after consensus.inl. A block begins at a multiple of its size in its row or group, so that the order of
// additions depends on nothing else.

// The entries of one chunk in float64; between them, ask(i, count) for what is read later in the place of i, i + 1, ...
template <class C, class Ask>
const double* in_double(const C* x, std::int64_t n, double* scratch, Ask ask) {
    constexpr std::int64_t at_once = 64;
    for (std::int64_t begin = 0; begin < n; begin += at_once) {
        ask(begin, at_once);
        if constexpr (!std::is_same_v<C, double>)
            for (std::int64_t i = begin; i < std::min(begin + at_once, n); ++i) scratch[i] = x[i];
    }
    if constexpr (std::is_same_v<C, double>) return x;
    return scratch;
}

// sums[lane] += term(i) for i = lane, lane + 16, ..., the sums kept in registers meanwhile.
template <class Term>
void add_lanes(double* sums, std::int64_t n, Term term) {
    double local[lanes];
    std::copy_n(sums, lanes, local);
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
#pragma GCC unroll 16
        for (std::int64_t lane = 0; lane < lanes; ++lane) local[lane] += term(i + lane);
    }
    for (std::int64_t lane = 0; i + lane < n; ++lane) local[lane] += term(i + lane);
    std::copy_n(local, lanes, sums);
}

inline double add_up(const double* sums) {
    double total = sums[0];
    for (std::int64_t lane = 1; lane < lanes; ++lane) total += sums[lane];
    return total;
}

// Call body(begin, n) for the chunks of each block of a range, then finish() at the block's end.
template <class Body, class Finish>
void for_blocks(const Range& range, Body body, Finish finish) {
    for (std::int64_t begin = range.begin; begin < range.end;) {
        const std::int64_t end = std::min(begin + block, range.end);
        for (std::int64_t n; begin < end; begin += n) {
            n = std::min(chunk, end - begin);
            body(begin, n);
        }
        finish();
    }
}

inline void gram(const Range& range, bool based, double* sums) {
    with_types(range, true, [&](auto stored, auto computed) {
        using S = decltype(stored);
        using C = decltype(computed);
        Tasks<S, C> tasks(range, based);
        const std::size_t models = tasks.models();
        std::vector<double> interleaved(models * models * lanes);
        Rows<double> scratch(models);
        std::vector<const double*> x(models);
        for_blocks(
            range,
            [&](std::int64_t begin, std::int64_t n) {
                tasks.read(begin, n);
                const bool as_they_lie = std::is_same_v<S, C> && !based;
                if (!as_they_lie) tasks.load(0, n, nullptr, nullptr);
                for (std::size_t k = 0; k < models; ++k) {
                    const auto ask = [&](std::int64_t i, std::int64_t count) {
                        const std::int64_t next = begin + n + i, left = std::min(count, range.end - next);
                        if (based && k == 0) tasks.ask_for(0, next, left);
                        tasks.ask_for(k + based, next, left);
                    };
                    const C* t = tasks.t[k];
                    if constexpr (std::is_same_v<S, C>)
                        if (as_they_lie) t = tasks.inputs()[k];
                    x[k] = in_double(t, n, scratch[k], ask);
                }
                for (std::size_t j = 0; j < models; ++j)
                    for (std::size_t k = 0; k <= j; ++k)
                        add_lanes(&interleaved[(j * models + k) * lanes], n,
                                  [a = x[j], b = x[k]](std::int64_t i) { return a[i] * b[i]; });
            },
            [&] {
                for (std::size_t j = 0; j < models; ++j)
                    for (std::size_t k = 0; k <= j; ++k)
                        sums[j * models + k] = add_up(&interleaved[(j * models + k) * lanes]);
                sums += models * models;
                std::fill(interleaved.begin(), interleaved.end(), 0.0);
            });
    });
}

inline void l1(const Range& range, const Plan& plan, std::size_t row, double* sums) {
    with_types(range, true, [&](auto stored, auto computed) {
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
        for_blocks(
            range,
            [&](std::int64_t begin, std::int64_t n) {
                tasks.read(begin, n);
                tasks.load(0, n, nullptr, nullptr);
                survivors.load(begin, n);
                for (std::size_t k = 0; k < models; ++k) {
                    add(2 * k, tasks.t[k], n);
                    add(2 * k + 1, survivors.tasks.t[k], n);
                }
            },
            [&] {
                for (std::size_t sum = 0; sum < 2 * models; ++sum) sums[sum] = add_up(&interleaved[sum * lanes]);
                sums += 2 * models;
                std::fill(interleaved.begin(), interleaved.end(), 0.0);
            });
    });
}
