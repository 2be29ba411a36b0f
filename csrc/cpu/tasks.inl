// Task vectors, chunk by chunk: what each model differs by from the base, where it survives trimming by magnitude.
//
// Included after loops.inl.

#include "../consensus.h"

// `count` rows of one chunk each, aligned to a cache line. Between rows lie a few lines more: loads wait for stores to
// addresses that are equal in their last twelve bits, which rows a power of two apart would have.
template <class T>
class Rows {
   public:
    explicit Rows(std::size_t count) : storage_(new T[count * stride + line / sizeof(T)]) {
        const auto address = reinterpret_cast<std::uintptr_t>(storage_.get());
        first_ = reinterpret_cast<T*>((address + line - 1) / line * line);
    }
    T* operator[](std::size_t row) { return first_ + row * stride; }

   private:
    static constexpr std::size_t stride = chunk + 5 * line / sizeof(T);
    std::unique_ptr<T[]> storage_;
    T* first_;
};

// Call body(first, count) for every group of at most four models, with the count known at compile time.
template <class Body>
void by_fours(std::size_t models, Body body) {
    std::size_t k = 0;
    for (; k + 4 <= models; k += 4) body(k, std::make_index_sequence<4>{});
    switch (models - k) {
        case 1: return body(k, std::make_index_sequence<1>{});
        case 2: return body(k, std::make_index_sequence<2>{});
        case 3: return body(k, std::make_index_sequence<3>{});
    }
}

template <bool Based, bool Trim, class S, class C, std::size_t... K>
void subtract(const S* base, const S* const* x, C* const* t, const Interval<C>* kept, const C* rescale, std::int64_t n,
              std::index_sequence<K...>) {
    const S* const in[] = {x[K]...};
    C* const out[] = {t[K]...};
    const Interval<C> all;
    const Key<C> low[] = {(Trim ? kept[K] : all).low...}, high[] = {(Trim ? kept[K] : all).high...};
    const C r[] = {(Trim ? rescale[K] : C{1})...};
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
        const C b = Based ? widen<C>(base[i]) : C{};
        ((out[K][i] = task<Based, Trim>(widen<C>(in[K][i]), b, low[K], high[K], r[K])), ...);
    }
}

// The task vectors of one range, read as values of the type S and computed in C.
template <class S, class C>
class Tasks {
   public:
    Tasks(const Range& range, bool based)
        : range_(range), based_(based), models_(range.width - based), widened_(range.width), tasks_(models_) {
        for (std::size_t k = 0; k < models_; ++k) t.push_back(tasks_[k]);
        inputs_.resize(range.width);
    }

    std::size_t models() const { return models_; }
    const S* base() const { return inputs_[0]; }                 // of the chunk last read
    const S* const* inputs() const { return &inputs_[based_]; }  // of the models

    std::vector<C*> t;  // [model], of the chunk last loaded

    void read(std::int64_t begin, std::int64_t n) {
        for (std::size_t k = 0; k < range_.width; ++k) inputs_[k] = values(range_.inputs[k], begin, n, widened_[k]);
    }

    // Ask for n elements of one input, to be read soon: what is computed meanwhile would leave the memory idle. More
    // than a few lines at a time would only wait for each other.
    void ask_for(std::size_t input, std::int64_t begin, std::int64_t n) const {
        const Operand& x = range_.inputs[input];
        const std::int64_t size = size_of(x.dtype);
        for (std::int64_t i = 0; i < n * size; i += line)
            __builtin_prefetch(reinterpret_cast<const char*>(x.address + begin * size + i));
        asm volatile("");  // a function that only asks has no effect, and calls of it would be left out
    }

    // Task vectors of the elements [from, to) of the chunk last read; with intervals only what survives, rescaled.
    void load(std::int64_t from, std::int64_t to, const Interval<C>* kept, const C* rescale) {
        const S* base = based_ ? inputs_[0] + from : nullptr;
        by_fours(models_, [&](std::size_t k, auto models) {
            const S* x[4] = {};
            C* out[4] = {};
            for (std::size_t j = 0; j < models.size(); ++j) {
                x[j] = inputs_[k + j + based_] + from;
                out[j] = t[k + j] + from;
            }
            if (kept == nullptr && based_) return subtract<true, false>(base, x, out, kept, rescale, to - from, models);
            if (kept == nullptr) return subtract<false, false>(base, x, out, kept, rescale, to - from, models);
            if (based_) return subtract<true, true>(base, x, out, kept + k, rescale + k, to - from, models);
            subtract<false, true>(base, x, out, kept + k, rescale + k, to - from, models);
        });
    }

   private:
    const Range& range_;
    std::size_t based_, models_;
    Rows<S> widened_;
    Rows<C> tasks_;
    std::vector<const S*> inputs_;
};

// The magnitudes that survive in a row, and what survivors are scaled by.
template <class C>
class Trimming {
   public:
    Trimming(const Plan& plan, std::size_t row, std::size_t models)
        : intervals(models),
          rescale(models, C{1}),
          by_magnitude(plan.keep.value != nullptr),
          leaves_all(!by_magnitude && plan.rescale == nullptr),
          plan_(plan),
          row_(row),
          length_(plan.lengths != nullptr ? plan.lengths[row] : 0) {
        if (plan.rescale != nullptr)
            for (std::size_t k = 0; k < models; ++k) rescale[k] = static_cast<C>(plan.rescale[row * models + k]);
    }

    std::vector<Interval<C>> intervals;
    std::vector<C> rescale;
    const bool by_magnitude, leaves_all;

    // Set the intervals that hold from element `at`, and return where they end.
    std::int64_t settle(std::int64_t at, std::int64_t end) {
        if (!by_magnitude) return end;
        const std::int64_t index = length_ > 0 ? at / length_ : 0, start = index * length_;
        if (length_ > 0) end = std::min(end, start + length_);
        const std::size_t models = intervals.size(), cuts = (plan_.first_group[row_] + index) * models;
        for (std::size_t k = 0; k < models; ++k) {
            const auto before = [&](const Cuts& cut) {
                const std::int64_t after = cut.index[cuts + k];
                if (at - start < after && after < end - start) end = start + after;
                return at - start < after;
            };
            const bool before_keep = before(plan_.keep);
            const bool dropping = plan_.drop.value != nullptr, before_drop = dropping && before(plan_.drop);
            const double drop = dropping ? plan_.drop.value[cuts + k] : std::numeric_limits<double>::infinity();
            intervals[k] = interval<C>(plan_.keep.value[cuts + k], before_keep, drop, before_drop);
        }
        return end;
    }

   private:
    const Plan& plan_;
    std::size_t row_;
    std::int64_t length_;
};

// As many blocks of random words at a time as the widest register holds, and what a register does to them at once.
#if ISTHMUS_STREAM == 64
using Blocks = unsigned long long __attribute__((vector_size(64)));
inline Blocks multiply_low(Blocks x, std::uint32_t factor) {
    return (Blocks)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
}
inline Blocks upper_half(Blocks x) { return (Blocks)_mm512_shuffle_epi32((__m512i)x, _MM_PERM_DDBB); }
inline void interleave(Blocks* out, Blocks a, Blocks b) {
    out[0] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    out[1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#elif ISTHMUS_STREAM == 32
using Blocks = unsigned long long __attribute__((vector_size(32)));
inline Blocks multiply_low(Blocks x, std::uint32_t factor) {
    return (Blocks)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
}
inline Blocks upper_half(Blocks x) { return (Blocks)_mm256_shuffle_epi32((__m256i)x, _MM_SHUFFLE(3, 3, 1, 1)); }
inline void interleave(Blocks* out, Blocks a, Blocks b) {
    out[0] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    out[1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
}
#else
using Blocks = std::uint64_t;
inline void interleave(Blocks* out, Blocks a, Blocks b) {
    out[0] = a;
    out[1] = b;
}
#endif

#include "../philox.h"

// The random words of n elements from `first`: word i is of element first + i.
class RandomWords {
   public:
    // Between them, ask(i, count) for what is read later in the place of the elements i, i + 1, ...
    template <class Ask>
    const std::uint32_t* fill(const std::int64_t* key, std::int64_t first, std::int64_t n, Ask ask) {
        constexpr std::int64_t at_once = sizeof(Blocks) / 8;
        const std::int64_t block = first / 4, blocks = (first % 4 + n + 3) / 4;
        const std::uint64_t c2 = key[2], c3 = key[3];
        const Blocks zero{}, low = zero + 0xffffffffu;
        const KeySchedule<Blocks> keys(key[0], key[1]);
        std::uint64_t counters[at_once];
        for (std::int64_t j = 0; j < at_once; ++j) counters[j] = block + j;
        Blocks counter;
        std::memcpy(&counter, counters, sizeof counter);
        for (std::int64_t i = 0; i < blocks; i += at_once, counter += at_once) {
            ask(4 * i, 4 * at_once);
            const Words<Blocks> w = philox<Blocks>({counter, counter >> 32, zero + c2, zero + c3}, keys);
            Blocks words[2];  // one block after the other
            interleave(words, (w.x0 & low) | (w.x1 << 32), (w.x2 & low) | (w.x3 << 32));
            std::memcpy(words_ + 4 * i, words, sizeof words);
        }
        return words_ + first % 4;
    }

   private:
    alignas(line) std::uint32_t words_[chunk + 4 * sizeof(Blocks) / 8 + 4];
};

// What survives of the task vectors of a range, by magnitude or at random, rescaled.
template <class S, class C>
class Survivors {
   public:
    Survivors(const Range& range, const Plan& plan, std::size_t row)
        : tasks(range, plan.based),
          trimming(plan, row, tasks.models()),
          range_(range),
          plan_(plan),
          row_(row),
          models_(tasks.models()),
          length_(plan.lengths != nullptr ? plan.lengths[row] : 0),
          words_(plan.random.keys != nullptr ? models_ : 0) {}

    Tasks<S, C> tasks;
    Trimming<C> trimming;

    // The survivors of n elements from `begin`, in tasks.t.
    void load(std::int64_t begin, std::int64_t n) {
        tasks.read(begin, n);
        if (plan_.random.keys != nullptr) {
            tasks.load(0, n, nullptr, nullptr);
            for (std::size_t k = 0; k < models_; ++k) draw(k, begin, n);
            return;
        }
        for (std::size_t k = 0; k < range_.width; ++k) tasks.ask_for(k, begin + n, std::min(n, range_.end - begin - n));
        if (trimming.leaves_all) {
            tasks.load(0, n, nullptr, nullptr);
        } else {
            for (std::int64_t from = begin, to; from < begin + n; from = to) {
                to = trimming.settle(from, begin + n);
                tasks.load(from - begin, to - begin, trimming.intervals.data(), trimming.rescale.data());
            }
        }
    }

    // The random words of n elements from `begin` for model k, which keeps those below a limit.
    const std::uint32_t* words(std::size_t k, std::int64_t begin, std::int64_t n) {
        const std::int64_t next = begin + n;  // the next chunk is asked for meanwhile
        const auto ask = [&](std::int64_t i, std::int64_t count) {
            const std::int64_t left = std::min(count, range_.end - next - i);
            if (plan_.based && k == 0) tasks.ask_for(0, next + i, left);
            tasks.ask_for(k + plan_.based, next + i, left);
        };
        return words_[k].fill(plan_.random.keys + 4 * (row_ * models_ + k), plan_.random.starts[row_] + begin, n, ask);
    }
    std::uint32_t limit(std::size_t k) const {
        return static_cast<std::uint32_t>(plan_.random.density[row_ * models_ + k] * 0x1p32);
    }
    C drawn_rescale(std::size_t k) const {
        return plan_.random.inverse ? static_cast<C>(1 / plan_.random.density[row_ * models_ + k])
                                    : trimming.rescale[k];
    }

   private:
    // Drop entries of model k at random and rescale the rest.
    void draw(std::size_t k, std::int64_t begin, std::int64_t n) {
        const Random& random = plan_.random;
        const std::size_t at = row_ * models_ + k;
        const double density = random.density[at];
        C* t = tasks.t[k];
        if (density <= 0) {
            std::fill_n(t, n, C{});
            return;
        }
        if (density >= 1) {
            for (std::int64_t i = 0; i < n; ++i) t[i] = rules::scaled(trimming.rescale[k], t[i]);
            return;
        }
        const std::uint32_t* word = words(k, begin, n);
        if (random.epsilon != nullptr) {
            for (std::int64_t from = begin, to; from < begin + n; from = to) {
                const std::int64_t group = from / length_;
                to = std::min(begin + n, (group + 1) * length_);
                rank(group);
                const Odds& odds = odds_[k];
                for (std::int64_t i = from; i < to; ++i) {
                    const std::size_t j = i - group * length_;
                    const C r = random.inverse ? odds.inverse[j] : trimming.rescale[k];
                    t[i - begin] = word[i - begin] < odds.limit[j] ? rules::scaled(r, t[i - begin]) : C{};
                }
            }
            return;
        }
        const std::uint32_t below = limit(k);
        const C r = drawn_rescale(k);
#pragma GCC ivdep
        for (std::int64_t i = 0; i < n; ++i) t[i] = drawn(t[i], word[i], below, r);
    }

    // How likely each element of a group is to survive, by the rank of its magnitude in the group.
    struct Odds {
        std::vector<std::uint32_t> limit;
        std::vector<C> inverse;
    };

    void rank(std::int64_t group) {
        if (group == ranked_) return;
        ranked_ = group;
        odds_.resize(models_);
        Tasks<S, C> all(range_, plan_.based);
        std::vector<std::pair<Key<C>, std::int64_t>> order;
        order.reserve(length_);
        for (std::size_t k = 0; k < models_; ++k) {
            const std::size_t at = row_ * models_ + k;
            const double density = plan_.random.density[at], epsilon = plan_.random.epsilon[at];
            if (density <= 0 || density >= 1) continue;
            order.clear();
            for (std::int64_t from = 0, n; from < length_; from += n) {
                n = std::min(chunk, length_ - from);
                all.read(group * length_ + from, n);
                all.load(0, n, nullptr, nullptr);
                for (std::int64_t i = 0; i < n; ++i)  // of equal magnitudes the first is the largest
                    order.emplace_back(magnitude(all.t[k][i]), -(from + i));
            }
            std::sort(order.begin(), order.end());
            odds_[k].limit.resize(length_);
            odds_[k].inverse.resize(length_);
            for (std::int64_t place = 0; place < length_; ++place) {
                const double p = length_ == 1
                                     ? density
                                     : density - epsilon + 2 * epsilon * static_cast<double>(place) / (length_ - 1);
                odds_[k].limit[-order[place].second] = static_cast<std::uint32_t>(p * 0x1p32);
                odds_[k].inverse[-order[place].second] = static_cast<C>(1 / p);
            }
        }
    }

    const Range& range_;
    const Plan& plan_;
    std::size_t row_, models_;
    std::int64_t length_;
    std::vector<RandomWords> words_;
    std::int64_t ranked_ = -1;
    std::vector<Odds> odds_;
};
