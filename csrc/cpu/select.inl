// The loops of selection: magnitudes as bits, and where they lie to brackets.
//
// Included after consensus.inl.

template <bool Based, class W, class S, class C, std::size_t... I>
void take_magnitudes(const S* base, const S* const* x, Key<W>* const* keys, std::int64_t n, std::index_sequence<I...>) {
    const S* const in[] = {x[I]...};
    Key<W>* const out[] = {keys[I]...};
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
        const C b = Based ? widen<C>(base[i]) : C{};
        ((out[I][i] = magnitude(static_cast<W>(task<Based, false>(widen<C>(in[I][i]), b, Key<C>{}, Key<C>{}, C{})))),
         ...);
    }
}

// Call visit(keys, n) for the magnitudes of chunks: keys[model] of n elements from each of `starts`, at most `run`
// each.
template <class K, class Visit>
void visit_magnitudes(const Range& range, bool based, const std::int64_t* starts, std::int64_t count, std::int64_t run,
                      Visit visit) {
    using Wide = std::conditional_t<sizeof(K) == 8, double, float>;
    with_types(range, true, [&](auto stored, auto computed) {
        using S = decltype(stored);
        using C = decltype(computed);
        if constexpr (sizeof(C) <= sizeof(K)) {  // a double is looked at with 64-bit keys alone
            Tasks<S, C> tasks(range, based);
            Rows<K> keys(tasks.models());
            for (std::int64_t s = 0; s < count; ++s) {
                const std::int64_t n = std::min(run, range.end - starts[s]);
                tasks.read(starts[s], n);
                by_fours(tasks.models(), [&](std::size_t k, auto models) {
                    K* out[4] = {};
                    for (std::size_t j = 0; j < models.size(); ++j) out[j] = keys[k + j];
                    if (based)
                        take_magnitudes<true, Wide, S, C>(tasks.base(), tasks.inputs() + k, out, n, models);
                    else
                        take_magnitudes<false, Wide, S, C>(nullptr, tasks.inputs() + k, out, n, models);
                });
                tasks.ask_for_next(n);
                visit(keys, n);
            }
        }
    });
}

template <class K>
void sample(const Range& range, bool based, const std::int64_t* starts, std::int64_t count, std::int64_t run,
            K* const* keys) {
    std::int64_t taken = 0;
    visit_magnitudes<K>(range, based, starts, count, run, [&](Rows<K>& found, std::int64_t n) {
        for (std::size_t k = 0; k < range.width - based; ++k) std::copy_n(found[k], n, keys[k] + taken);
        taken += n;
    });
}

// Sort keys into a bracket; returns the largest.
template <class K>
K classify(const K* keys, std::int64_t n, Bracket<K>& bracket) {
    const K low = bracket.low, high = bracket.high;
    alignas(line) std::uint8_t inside[chunk + 8] = {};
    std::int32_t above = 0, from_high = 0, above_low = 0, from_low = 0;
    K most = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        inside[i] = (keys[i] > low) & (keys[i] < high);
        above += keys[i] > high;
        from_high += keys[i] >= high;
        above_low += keys[i] > low;
        from_low += keys[i] >= low;
        most = std::max(most, keys[i]);
    }
    bracket.above += above;
    bracket.at_high += from_high - above;
    if (low == high) return most;
    const std::int32_t within = above_low - from_high;
    bracket.at_low += from_low - above_low;
    const bool fits = bracket.count + within <= bracket.capacity;
    K* found = bracket.found + bracket.count;
    bracket.count += within;
    if (!fits || within == 0) return most;
    for (std::int64_t begin = 0; begin < n; begin += 8) {  // few are inside: look at eight together
        std::uint64_t any;
        std::memcpy(&any, inside + begin, 8);
        if (any == 0) continue;
        for (std::int64_t i = begin; i < begin + 8; ++i) {  // written without a branch, and again unless inside
            *found = keys[i];
            found += inside[i];
        }
    }
    return most;
}

template <class K>
void sweep(const Range& range, bool based, Bracket<K>* brackets, const std::size_t* first, K* top) {
    std::vector<std::int64_t> starts;
    for (std::int64_t begin = range.begin; begin < range.end; begin += chunk) starts.push_back(begin);
    visit_magnitudes<K>(range, based, starts.data(), starts.size(), chunk, [&](Rows<K>& keys, std::int64_t n) {
        for (std::size_t k = 0; k < range.width - based; ++k)
            for (std::size_t b = first[k]; b < first[k + 1]; ++b)
                top[k] = std::max(top[k], classify(keys[k], n, brackets[b]));
    });
}

inline void sample32(const Range& range, bool based, const std::int64_t* starts, std::int64_t count, std::int64_t run,
                     std::int32_t* const* keys) {
    sample(range, based, starts, count, run, keys);
}
inline void sample64(const Range& range, bool based, const std::int64_t* starts, std::int64_t count, std::int64_t run,
                     std::int64_t* const* keys) {
    sample(range, based, starts, count, run, keys);
}
inline void sweep32(const Range& range, bool based, Bracket<std::int32_t>* b, const std::size_t* first,
                    std::int32_t* top) {
    sweep(range, based, b, first, top);
}
inline void sweep64(const Range& range, bool based, Bracket<std::int64_t>* b, const std::size_t* first,
                    std::int64_t* top) {
    sweep(range, based, b, first, top);
}
