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

// The magnitudes of the task vectors of a range, chunk by chunk.
template <class K, class S, class C>
class Magnitudes {
   public:
    Magnitudes(const Range& range, bool based) : tasks(range, based), based_(based), keys_(tasks.models()) {}

    Tasks<S, C> tasks;

    K* operator[](std::size_t model) { return keys_[model]; }  // of the chunk last read

    void read(std::int64_t begin, std::int64_t n) {
        tasks.read(begin, n);
        if constexpr (sizeof(K) == sizeof(bf16)) {  // there is no base
            for (std::size_t k = 0; k < tasks.models(); ++k)
                std::transform(tasks.inputs()[k], tasks.inputs()[k] + n, keys_[k], magnitude<bf16>);
        } else {
            using Wide = std::conditional_t<sizeof(K) == 8, double, float>;
            by_fours(tasks.models(), [&](std::size_t k, auto models) {
                K* out[4] = {};
                for (std::size_t j = 0; j < models.size(); ++j) out[j] = keys_[k + j];
                if (based_)
                    take_magnitudes<true, Wide, S, C>(tasks.base(), tasks.inputs() + k, out, n, models);
                else
                    take_magnitudes<false, Wide, S, C>(nullptr, tasks.inputs() + k, out, n, models);
            });
        }
    }

   private:
    bool based_;
    Rows<K> keys_;
};

// Call body(magnitudes) for the types of a range.
template <class K, class Body>
void with_magnitudes(const Range& range, bool based, Body body) {
    with_types(range, true, [&](auto stored, auto computed) {
        using S = decltype(stored);
        if constexpr (sizeof(S) <= sizeof(K)) {  // wider values are looked at with wider keys alone
            Magnitudes<K, S, decltype(computed)> magnitudes(range, based);
            body(magnitudes);
        }
    });
}

template <class K>
void sample(const Range& range, bool based, const std::int64_t* starts, std::int64_t count, std::int64_t run,
            K* const* keys) {
    constexpr std::int64_t ahead = 16;  // places far apart: the memory is asked for so many at a time
    with_magnitudes<K>(range, based, [&](auto& magnitudes) {
        for (std::int64_t s = -ahead, taken = 0; s < count; ++s) {
            if (s + ahead < count)
                for (std::size_t input = 0; input < range.width; ++input)
                    magnitudes.tasks.ask_for(input, starts[s + ahead], std::min(run, range.end - starts[s + ahead]));
            if (s < 0) continue;
            const std::int64_t n = std::min(run, range.end - starts[s]);
            magnitudes.read(starts[s], n);
            for (std::size_t k = 0; k < range.width - based; ++k) std::copy_n(magnitudes[k], n, keys[k] + taken);
            taken += n;
        }
    });
}

// As many keys as a register holds.
#ifdef ISTHMUS_STREAM
constexpr std::size_t register_bytes = ISTHMUS_STREAM;
#else
constexpr std::size_t register_bytes = 16;
#endif
template <class K>
using Lanes __attribute__((vector_size(register_bytes))) = K;

// One bit for each key: whether it lies strictly between two others.
template <class K>
std::uint64_t between(Lanes<K> key, Lanes<K> low, Lanes<K> high) {
#if ISTHMUS_STREAM == 64
    const auto x = (__m512i)key, a = (__m512i)low, b = (__m512i)high;
    if constexpr (sizeof(K) == 2) return _mm512_mask_cmpgt_epi16_mask(_mm512_cmpgt_epi16_mask(x, a), b, x);
    if constexpr (sizeof(K) == 4) return _mm512_mask_cmpgt_epi32_mask(_mm512_cmpgt_epi32_mask(x, a), b, x);
    if constexpr (sizeof(K) == 8) return _mm512_mask_cmpgt_epi64_mask(_mm512_cmpgt_epi64_mask(x, a), b, x);
#else
    const Lanes<K> inside = (key > low) & (key < high);
#if ISTHMUS_STREAM == 32
    if constexpr (sizeof(K) == 2) {
        const __m128i half = _mm256_castsi256_si128((__m256i)inside);
        return static_cast<unsigned>(
            _mm_movemask_epi8(_mm_packs_epi16(half, _mm256_extracti128_si256((__m256i)inside, 1))));
    }
    if constexpr (sizeof(K) == 4) return static_cast<unsigned>(_mm256_movemask_ps((__m256)inside));
    if constexpr (sizeof(K) == 8) return static_cast<unsigned>(_mm256_movemask_pd((__m256d)inside));
#elif ISTHMUS_STREAM == 16
    if constexpr (sizeof(K) == 2)
        return static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16((__m128i)inside, __m128i{})));
    if constexpr (sizeof(K) == 4) return static_cast<unsigned>(_mm_movemask_ps((__m128)inside));
    if constexpr (sizeof(K) == 8) return static_cast<unsigned>(_mm_movemask_pd((__m128d)inside));
#else
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < register_bytes / sizeof(K); ++i) bits |= std::uint64_t(inside[i] & 1) << i;
    return bits;
#endif
#endif
}

// Add one to the lanes where a comparison holds: there it is -1.
template <class K>
void count_where(Lanes<K>& counts, Lanes<K> holds) {
#if ISTHMUS_STREAM == 64
    counts = holds ? counts + 1 : counts;  // one instruction
#else
    counts -= holds;
#endif
}

// Counts of keys, lane by lane, and the largest of them.
template <class K>
struct alignas(line) Counted {
    Lanes<K> above{}, from_high{}, from_low{}, most{};

    static std::int64_t add_up(Lanes<K> counts) {
        std::int64_t sum = 0;
        for (std::size_t i = 0; i < register_bytes / sizeof(K); ++i) sum += counts[i];
        return sum;
    }
};

// Sort the keys of one chunk into a bracket. Sixty-four at a time: first ask(begin) for what is read later.
template <class K, class Ask>
void classify(K* keys, std::int64_t n, Bracket<K>& bracket, Counted<K>& counted, Ask ask) {
    constexpr std::int64_t width = register_bytes / sizeof(K), at_once = 64;
    const Lanes<K> low = Lanes<K>{} + bracket.low, high = Lanes<K>{} + bracket.high;
    Counted<K> counts = counted;
    K* found = bracket.found + std::min(bracket.count, bracket.capacity);
    std::fill(keys + n, keys + (n + at_once - 1) / at_once * at_once, K{-1});  // smaller than any magnitude
    for (std::int64_t begin = 0; begin < n; begin += at_once) {
        ask(begin);
        std::uint64_t inside = 0;
        for (std::int64_t i = 0; i < at_once; i += width) {
            Lanes<K> key;
            std::memcpy(&key, keys + begin + i, sizeof key);
            count_where<K>(counts.above, key > high);
            count_where<K>(counts.from_high, key >= high);
            count_where<K>(counts.from_low, key >= low);
            counts.most = key > counts.most ? key : counts.most;
            inside |= between<K>(key, low, high) << i;
        }
        const int within = __builtin_popcountll(inside);
        const bool fits = bracket.count + within <= bracket.capacity;
        bracket.count += within;
        if (!fits) continue;
        const auto take = [&] {
            *found = keys[begin + __builtin_ctzll(inside | std::uint64_t{1} << 63)];
            found += inside != 0;
            inside &= inside - 1;
        };
        take();  // few are inside, mostly none, one or two: these are taken without a branch
        take();
        while (inside != 0) take();
    }
    counted = counts;
}

template <class K>
void sweep(const Range& range, bool based, Bracket<K>* brackets, const std::size_t* first, K* top) {
    const std::size_t models = range.width - based;
    std::vector<Counted<K>> counted(first[models]);
    std::vector<std::int64_t> kept;
    for (std::size_t b = 0; b < first[models]; ++b) kept.push_back(brackets[b].count);
    with_magnitudes<K>(range, based, [&](auto& magnitudes) {
        for (std::int64_t begin = range.begin; begin < range.end; begin += chunk) {
            const std::int64_t n = std::min(chunk, range.end - begin), next = std::min(chunk, range.end - begin - n);
            magnitudes.read(begin, n);
            for (std::size_t k = 0; k < models; ++k)
                for (std::size_t b = first[k]; b < first[k + 1]; ++b)
                    classify(magnitudes[k], n, brackets[b], counted[b], [&](std::int64_t at) {
                        if (b != first[k]) return;
                        const std::int64_t coming = std::min<std::int64_t>(64, next - at);
                        if (based && k == 0) magnitudes.tasks.ask_for(0, begin + n + at, coming);
                        magnitudes.tasks.ask_for(k + based, begin + n + at, coming);
                    });
        }
    });
    for (std::size_t k = 0; k < models; ++k)
        for (std::size_t b = first[k]; b < first[k + 1]; ++b) {
            Bracket<K>& bracket = brackets[b];
            const std::int64_t above = Counted<K>::add_up(counted[b].above);
            const std::int64_t from_high = Counted<K>::add_up(counted[b].from_high);
            const std::int64_t from_low = Counted<K>::add_up(counted[b].from_low);
            bracket.above += above;
            bracket.at_high += from_high - above;
            bracket.at_low += from_low - from_high - (bracket.count - kept[b]);
            for (std::size_t i = 0; i < register_bytes / sizeof(K); ++i) top[k] = std::max(top[k], counted[b].most[i]);
        }
}

template <class K>
SelectionLoops<K> selection() {
    return {sample<K>, sweep<K>};
}
