// The loops, included once per instruction set inside a namespace of its own under that set's target pragma.
//
// A range is worked through in chunks small enough for the first-level cache: widen the inputs where they are not of
// the type C that the rule computes in, apply the rule to all inputs at once (reading them in step is what keeps the
// memory busy), then narrow and store. Before inclusion define
//   ISTHMUS_F16C    where the set converts float16 in hardware
//   ISTHMUS_STREAM  the bytes of the widest store that bypasses the caches, or nothing

template <class C>
constexpr Dtype dtype_of = std::is_same_v<C, double> ? Dtype::f64 : Dtype::f32;

constexpr std::int64_t chunk = 128;  // elements; a multiple of a cache line for every dtype
constexpr std::size_t group = 8;     // inputs read in step
constexpr std::int64_t line = 64;    // bytes

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

// The n values of `operand` from element `begin`, of type C: where they lie, or widened into `scratch`.
template <class C>
const C* values(const Operand& operand, std::int64_t begin, std::int64_t n, C* scratch) {
    if constexpr (std::is_same_v<C, double>) {
        if (operand.dtype == Dtype::f64) return reinterpret_cast<const double*>(operand.address) + begin;
    }
    switch (operand.dtype) {
        case Dtype::f32:
            if constexpr (std::is_same_v<C, float>) return reinterpret_cast<const float*>(operand.address) + begin;
            widen_all<float>(scratch, operand.address, begin, n);
            break;
        case Dtype::bf16: widen_all<bf16>(scratch, operand.address, begin, n); break;
        case Dtype::f16: widen_all<f16>(scratch, operand.address, begin, n); break;
        case Dtype::f64: break;  // computes in double, returned above
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

template <class S, class C>
void store(std::uintptr_t address, std::int64_t begin, const C* x, std::int64_t n, bool stream) {
    S* out = reinterpret_cast<S*>(address) + begin;
    if (!stream) return narrow_all(out, x, n);
    alignas(line) S narrowed[chunk];
    const S* from = narrowed;
    if constexpr (std::is_same_v<S, C>) {
        from = x;
    } else {
        narrow_all(narrowed, x, n);
    }
    stream_bytes(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(from), n * sizeof(S));
}

// Work through a range chunk by chunk: rule(begin, n, result) fills result[0..n), which is then stored. The result is
// the output itself where that needs no conversion, is not written past the caches, and is not read again by a later
// group of inputs; being exactly an input, it may then be read and written at one index.
template <class C, class Rule>
void for_chunks(const Range& range, Rule rule) {
    const Operand& out = range.output;
    if (out.dtype == dtype_of<C> && !range.stream && range.width <= group) {
        C* result = reinterpret_cast<C*>(out.address);
        for (std::int64_t begin = range.begin; begin < range.end; begin += chunk)
            rule(begin, std::min(chunk, range.end - begin), result + begin);
        return;
    }
    alignas(line) C result[chunk];
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

// Call `body` with a zero of the type that the rule computes in: double where an input is, else float.
template <class Body>
void in_compute_type(const Range& range, Body body) {
    for (std::size_t k = 0; k < range.width; ++k)
        if (range.inputs[k].dtype == Dtype::f64) return body(double{});
    body(float{});
}

inline void lerp(const Range& range, double weight) {
    in_compute_type(range, [&](auto zero) {
        using C = decltype(zero);
        const Operand &first = range.inputs[0], &second = range.inputs[1];
        alignas(line) C scratch_a[chunk], scratch_b[chunk];
        if (weight == 0 || weight == 1)
            return for_chunks<C>(range, [&](std::int64_t begin, std::int64_t n, C* result) {
                std::memmove(result, values(weight == 0 ? first : second, begin, n, scratch_a), n * sizeof(C));
            });
        const bool near_a = weight < 0.5;
        const C w = static_cast<C>(near_a ? weight : 1 - weight);
        for_chunks<C>(range, [&](std::int64_t begin, std::int64_t n, C* result) {
            const C* a = values(first, begin, n, scratch_a);
            const C* b = values(second, begin, n, scratch_b);
            if (near_a) {
#pragma GCC ivdep
                for (std::int64_t i = 0; i < n; ++i) result[i] = rules::lerp_from_a(a[i], b[i], w);
            } else {
#pragma GCC ivdep
                for (std::int64_t i = 0; i < n; ++i) result[i] = rules::lerp_from_b(a[i], b[i], w);
            }
        });
    });
}

// result = (result +) w[0] x[0] + ... + w[K-1] x[K-1], from the left.
template <bool Continue, class C, std::size_t... K>
void fold(C* result, const C* const* x, const C* w, std::int64_t n, std::index_sequence<K...>) {
    const C* const first = x[0];
    const C w0 = w[0];
    [[maybe_unused]] const C* const next[sizeof...(K) + 1] = {x[K + 1]..., nullptr};
    [[maybe_unused]] const C wn[sizeof...(K) + 1] = {w[K + 1]..., C{}};
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
        C sum = Continue ? rules::add_scaled(result[i], w0, first[i]) : rules::scaled(w0, first[i]);
        ((sum = rules::add_scaled(sum, wn[K], next[K][i])), ...);
        result[i] = sum;
    }
}

template <bool Continue, class C>
void fold_group(C* result, const C* const* x, const C* w, std::size_t inputs, std::int64_t n) {
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
    in_compute_type(range, [&](auto zero) {
        using C = decltype(zero);
        std::vector<C> w(weights, weights + range.width);
        alignas(line) C scratch[group][chunk];
        for_chunks<C>(range, [&](std::int64_t begin, std::int64_t n, C* result) {
            for (std::size_t k = 0; k < range.width; k += group) {
                const std::size_t inputs = std::min(group, range.width - k);
                const C* x[group];
                for (std::size_t j = 0; j < inputs; ++j) x[j] = values(range.inputs[k + j], begin, n, scratch[j]);
                if (k == 0)
                    fold_group<false>(result, x, w.data(), inputs, n);
                else
                    fold_group<true>(result, x, w.data() + k, inputs, n);
            }
        });
    });
}
