// The loops, included once per instruction set inside a namespace of its own under that set's target pragma.
//
// A rule computes in the type C, float or double. Its loops read and write values of a type S: C itself, or bf16 where
// all tensors of the row are. A range is worked through in chunks small enough for the first-level cache: widen the
// inputs that are not of type S, apply the rule to all inputs at once (reading them in step is what keeps the memory
// busy), then narrow and store. Before inclusion define
//   ISTHMUS_F16C    where the set converts float16 in hardware
//   ISTHMUS_STREAM  the bytes of the widest store that bypasses the caches, or nothing

template <class S>
constexpr Dtype dtype_of = std::is_same_v<S, double>  ? Dtype::f64
                           : std::is_same_v<S, float> ? Dtype::f32
                           : std::is_same_v<S, bf16>  ? Dtype::bf16
                                                      : Dtype::f16;

constexpr std::size_t group = 8;   // inputs read in step
constexpr std::int64_t line = 64;  // bytes

template <class S, class C>
void widen_all(C* __restrict__ out, std::uintptr_t address, std::int64_t begin, std::int64_t n) {
    const S* x = reinterpret_cast<const S*>(address) + begin;
    std::int64_t i = 0;
#ifdef ISTHMUS_F16C
    if constexpr (std::is_same_v<S, f16> && std::is_same_v<C, float>)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
    for (; i < n; ++i) out[i] = widen<C>(x[i]);
}

template <class S, class C>
void narrow_all(S* __restrict__ out, const C* __restrict__ x, std::int64_t n) {
    std::int64_t i = 0;
#ifdef ISTHMUS_F16C
    if constexpr (std::is_same_v<S, f16> && std::is_same_v<C, float>)
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                             _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) narrow(out[i], x[i]);
}

// The n values of `operand` from element `begin`, of type S: where they lie, or widened into `scratch`.
template <class S>
const S* values(const Operand& operand, std::int64_t begin, std::int64_t n, S* scratch) {
    if (operand.dtype == dtype_of<S>) return reinterpret_cast<const S*>(operand.address) + begin;
    if constexpr (!std::is_same_v<S, bf16>) {
        switch (operand.dtype) {
            case Dtype::f32: widen_all<float>(scratch, operand.address, begin, n); break;
            case Dtype::bf16: widen_all<bf16>(scratch, operand.address, begin, n); break;
            case Dtype::f16: widen_all<f16>(scratch, operand.address, begin, n); break;
            case Dtype::f64: break;  // is computed in double, and returned above
        }
    }
    return scratch;
}

// Copy bytes from scratch to memory past the caches; `out` is aligned to a cache line.
inline void stream_bytes(char* out, const char* x, std::int64_t bytes) {
    std::int64_t i = 0;
#if ISTHMUS_STREAM == 64
    for (; i + 64 <= bytes; i += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_load_si512(x + i));
#elif ISTHMUS_STREAM == 32
    for (; i + 32 <= bytes; i += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i),
                            _mm256_load_si256(reinterpret_cast<const __m256i*>(x + i)));
#elif ISTHMUS_STREAM == 16
    for (; i + 16 <= bytes; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), _mm_load_si128(reinterpret_cast<const __m128i*>(x + i)));
#endif
    std::memcpy(out + i, x + i, bytes - i);
}

// Write n results to an output of the type T.
template <class T, class S>
void store(std::uintptr_t address, std::int64_t begin, const S* x, std::int64_t n, bool stream) {
    T* out = reinterpret_cast<T*>(address) + begin;
    if constexpr (std::is_same_v<T, S>) {
        if (stream)
            stream_bytes(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(x), n * sizeof(T));
        else
            std::memcpy(out, x, n * sizeof(T));
    } else if constexpr (!std::is_same_v<S, bf16>) {
        if (!stream) return narrow_all(out, x, n);
        alignas(line) T narrowed[chunk];
        narrow_all(narrowed, x, n);
        stream_bytes(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(narrowed), n * sizeof(T));
    }
}

// Work through a range chunk by chunk: rule(begin, n, result) fills result[0..n), which is then stored. The result is
// the output itself where that needs no conversion, is not written past the caches, and is not read again by a later
// group of inputs; being exactly an input, it may then be read and written at one index.
template <class S, class Rule>
void for_chunks(const Range& range, Rule rule) {
    const Operand& out = range.output;
    if (out.dtype == dtype_of<S> && !range.stream && range.width <= group) {
        S* result = reinterpret_cast<S*>(out.address);
        for (std::int64_t begin = range.begin; begin < range.end; begin += chunk)
            rule(begin, std::min(chunk, range.end - begin), result + begin);
        return;
    }
    alignas(line) S result[chunk];
    // The first chunk is short where that brings the later ones to the start of a cache line.
    const std::int64_t past = (out.address + range.begin * size_of(out.dtype)) % line / size_of(out.dtype);
    bool stream = range.stream && past == 0;
    std::int64_t n = range.stream && past != 0 ? line / size_of(out.dtype) - past : chunk;
    for (std::int64_t begin = range.begin; begin < range.end; begin += n, n = chunk, stream = range.stream) {
        n = std::min(n, range.end - begin);
        rule(begin, n, result);
        switch (out.dtype) {
            case Dtype::f64: store<double>(out.address, begin, result, n, stream); break;
            case Dtype::f32: store<float>(out.address, begin, result, n, stream); break;
            case Dtype::bf16: store<bf16>(out.address, begin, result, n, stream); break;
            case Dtype::f16: store<f16>(out.address, begin, result, n, stream); break;
        }
    }
}

// Call `body` with a value of the type S that its loops read and one of the type C that they compute in. S may be
// bf16 if `bf16_stays` and all inputs are.
template <class Body>
void with_types(const Range& range, bool bf16_stays, Body body) {
    bool is_double = false, all_bf16 = bf16_stays;
    for (std::size_t k = 0; k < range.width; ++k) {
        is_double |= range.inputs[k].dtype == Dtype::f64;
        all_bf16 &= range.inputs[k].dtype == Dtype::bf16;
    }
    if (is_double)
        body(double{}, double{});
    else if (all_bf16)
        body(bf16{}, float{});
    else
        body(float{}, float{});
}

// Whether loops that write the type they read may do so in bf16. One rounding at the end: sums that go on from an
// earlier group of inputs must not be kept in 16 bits.
inline bool writes_bf16(const Range& range) { return range.output.dtype == Dtype::bf16 && range.width <= group; }

inline void lerp(const Range& range, double weight) {
    with_types(range, writes_bf16(range), [&](auto stored, auto computed) {
        using S = decltype(stored);
        using C = decltype(computed);
        const Operand &first = range.inputs[0], &second = range.inputs[1];
        alignas(line) S scratch_a[chunk], scratch_b[chunk];
        if (weight == 0 || weight == 1)
            return for_chunks<S>(range, [&](std::int64_t begin, std::int64_t n, S* result) {
                std::memmove(result, values(weight == 0 ? first : second, begin, n, scratch_a), n * sizeof(S));
            });
        const bool near_a = weight < 0.5;
        const C w = static_cast<C>(near_a ? weight : 1 - weight);
        for_chunks<S>(range, [&](std::int64_t begin, std::int64_t n, S* result) {
            const S* a = values(first, begin, n, scratch_a);
            const S* b = values(second, begin, n, scratch_b);
            if (near_a) {
#pragma GCC ivdep
                for (std::int64_t i = 0; i < n; ++i)
                    narrow(result[i], rules::lerp_from_a(widen<C>(a[i]), widen<C>(b[i]), w));
            } else {
#pragma GCC ivdep
                for (std::int64_t i = 0; i < n; ++i)
                    narrow(result[i], rules::lerp_from_b(widen<C>(a[i]), widen<C>(b[i]), w));
            }
        });
    });
}

// result = (result +) w[0] x[0] + ... + w[K-1] x[K-1], from the left.
template <bool Continue, class S, class C, std::size_t... K>
void fold(S* result, const S* const* x, const C* w, std::int64_t n, std::index_sequence<K...>) {
    const S* const first = x[0];
    const C w0 = w[0];
    [[maybe_unused]] const S* const next[sizeof...(K) + 1] = {x[K + 1]..., nullptr};
    [[maybe_unused]] const C wn[sizeof...(K) + 1] = {w[K + 1]..., C{}};
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
        const C x0 = widen<C>(first[i]);
        C sum = Continue ? rules::add_scaled(widen<C>(result[i]), w0, x0) : rules::scaled(w0, x0);
        ((sum = rules::add_scaled(sum, wn[K], widen<C>(next[K][i]))), ...);
        narrow(result[i], sum);
    }
}

template <bool Continue, class S, class C>
void fold_group(S* result, const S* const* x, const C* w, std::size_t inputs, std::int64_t n) {
    static_assert(group == 8);
    switch (inputs) {
        case 1: return fold<Continue>(result, x, w, n, std::make_index_sequence<0>{});
        case 2: return fold<Continue>(result, x, w, n, std::make_index_sequence<1>{});
        case 3: return fold<Continue>(result, x, w, n, std::make_index_sequence<2>{});
        case 4: return fold<Continue>(result, x, w, n, std::make_index_sequence<3>{});
        case 5: return fold<Continue>(result, x, w, n, std::make_index_sequence<4>{});
        case 6: return fold<Continue>(result, x, w, n, std::make_index_sequence<5>{});
        case 7: return fold<Continue>(result, x, w, n, std::make_index_sequence<6>{});
        default: return fold<Continue>(result, x, w, n, std::make_index_sequence<7>{});
    }
}

inline void weighted_sum(const Range& range, const double* weights) {
    with_types(range, writes_bf16(range), [&](auto stored, auto computed) {
        using S = decltype(stored);
        using C = decltype(computed);
        std::vector<C> w(weights, weights + range.width);
        alignas(line) S scratch[group][chunk];
        for_chunks<S>(range, [&](std::int64_t begin, std::int64_t n, S* result) {
            for (std::size_t k = 0; k < range.width; k += group) {
                const std::size_t inputs = std::min(group, range.width - k);
                const S* x[group];
                for (std::size_t j = 0; j < inputs; ++j) x[j] = values(range.inputs[k + j], begin, n, scratch[j]);
                if (k == 0)
                    fold_group<false>(result, x, w.data(), inputs, n);
                else
                    fold_group<true>(result, x, w.data() + k, inputs, n);
            }
        });
    });
}
