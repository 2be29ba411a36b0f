// The loops of selection: magnitudes as bits, and where they lie to brackets.
//
// Included after consensus.inl.

// Call visit(keys, n) for the magnitudes of chunks: keys[model] of n elements from each of `starts`, at most `run`
// each.
template <class K, class Visit>
void visit_magnitudes(const Range& range, bool based, const std::int64_t* starts, std::int64_t count, std::int64_t run,
                      Visit visit) {
    using Wide = std::conditional_t<sizeof(K) == 8, double, float>;
    with_task_types(range, [&](auto stored, auto computed) {
        using C = decltype(computed);
        if constexpr (sizeof(C) <= sizeof(K)) {  // a double is looked at with 64-bit keys alone
            Tasks<decltype(stored), C> tasks(range, based);
            Rows<K> keys(tasks.models());
            for (std::int64_t s = 0; s < count; ++s) {
                const std::int64_t n = std::min(run, range.end - starts[s]);
                tasks.read(starts[s], n);
                tasks.load(0, n, nullptr, nullptr);
                tasks.ask_for_next(n);
                for (std::size_t k = 0; k < tasks.models(); ++k) {
                    const C* t = tasks.t[k];
                    K* out = keys[k];
                    for (std::int64_t i = 0; i < n; ++i) out[i] = magnitude(static_cast<Wide>(t[i]));
                }
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

template <class K>
void classify(const K* keys, std::int64_t n, Bracket<K>& bracket) {
    const K low = bracket.low, high = bracket.high;
    alignas(line) std::uint8_t inside[chunk + 8] = {};
    std::int32_t above = 0, at_high = 0, from_low = 0, within = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const bool is_within = (keys[i] > low) & (keys[i] < high);
        inside[i] = is_within;
        within += is_within;
        above += keys[i] > high;
        at_high += keys[i] == high;
        from_low += keys[i] >= low;
    }
    bracket.above += above;
    bracket.at_high += at_high;
    if (low != high) bracket.at_low += from_low - within - above - at_high;
    const bool fits = bracket.count + within <= bracket.capacity;
    K* found = bracket.found + bracket.count;
    bracket.count += within;
    if (!fits || within == 0) return;
    for (std::int64_t begin = 0; begin < n; begin += 8) {  // few are inside: look at eight together
        std::uint64_t any;
        std::memcpy(&any, inside + begin, 8);
        if (any == 0) continue;
        for (std::int64_t i = begin; i < begin + 8; ++i)
            if (inside[i]) *found++ = keys[i];
    }
}

template <class K>
void sweep(const Range& range, bool based, Bracket<K>* brackets, const std::size_t* first, K* top) {
    std::vector<std::int64_t> starts;
    for (std::int64_t begin = range.begin; begin < range.end; begin += chunk) starts.push_back(begin);
    visit_magnitudes<K>(range, based, starts.data(), starts.size(), chunk, [&](Rows<K>& keys, std::int64_t n) {
        for (std::size_t k = 0; k < range.width - based; ++k) {
            const K* of = keys[k];
            K most = top[k];
            for (std::int64_t i = 0; i < n; ++i) most = std::max(most, of[i]);
            top[k] = most;
            for (std::size_t b = first[k]; b < first[k + 1]; ++b) classify(of, n, brackets[b]);
        }
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
