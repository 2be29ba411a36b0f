// The smallest of some numbers, and where they are.
//
// Included after select.inl.

constexpr double infinity = std::numeric_limits<double>::infinity();

template <class T>
Lanes<T> load(const T* x) {
    Lanes<T> values;
    std::memcpy(&values, x, sizeof values);
    return values;
}

template <class T>
T smallest_lane(Lanes<T> x) {
    T low = x[0];
    for (std::size_t l = 1; l < register_bytes / sizeof(T); ++l) low = x[l] < low ? x[l] : low;
    return low;
}

// The smallest of n values, n > 0 a multiple of 16.
inline double smallest(const double* x, std::int64_t n) {
    constexpr std::int64_t width = register_bytes / sizeof(double);
    Lanes<double> even = load(x), odd = load(x + width);
    for (std::int64_t i = 2 * width; i < n; i += 2 * width) {
        const Lanes<double> a = load(x + i), b = load(x + i + width);
        even = a < even ? a : even;
        odd = b < odd ? b : odd;
    }
    return smallest_lane<double>(odd < even ? odd : even);
}

// One bit for each of 8 values: whether it is at most the limit.
inline unsigned at_most(const double* x, double limit) {
#if ISTHMUS_STREAM == 64
    return _mm512_cmp_pd_mask(_mm512_loadu_pd(x), _mm512_set1_pd(limit), _CMP_LE_OQ);
#elif ISTHMUS_STREAM == 32
    const __m256d all = _mm256_set1_pd(limit);
    return _mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(x), all, _CMP_LE_OQ)) |
           _mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(x + 4), all, _CMP_LE_OQ)) << 4;
#else
    unsigned bits = 0;
    for (int i = 0; i < 8; ++i) bits |= unsigned{x[i] <= limit} << i;
    return bits;
#endif
}

// The first of many values that is at most the limit; one is.
inline std::int64_t first_at_most(const double* x, double limit) {
    for (std::int64_t i = 0;; i += 8)
        if (const unsigned bits = at_most(x + i, limit)) return i + __builtin_ctz(bits);
}
