// The consensus of task vectors: trimmed, elected by sign, and merged into the base.
//
// Included after tasks.inl. The arithmetic of one entry stands in ../consensus.h. The usual case, up to eight models
// trimmed by magnitude, runs in one loop that keeps an entry in registers, so that memory is read while it computes;
// everything else goes chunk by chunk through the first-level cache.

// What a consensus does to one row, as numbers of the type it computes in.
template <class C>
struct Numbers {
    Numbers(const Plan& plan, std::size_t row, std::size_t models, int zero_sign)
        : weights(models),
          shares(models),
          zero(zero_sign < 0 ? ~highest<C> : 0),
          cancel(zero_sign == 0),
          scaling(static_cast<C>(plan.scaling[row])) {
        for (std::size_t k = 0; k < models; ++k) {
            weights[k] = static_cast<C>(plan.weights[row * models + k]);
            shares[k] = static_cast<C>(plan.divisors[row * models + k]);
        }
    }

    std::vector<C> weights, shares;
    Key<C> zero;
    bool cancel;
    C scaling;
};

struct Votes {
    std::int32_t positive = 0, negative = 0;  // in one chunk

    template <class C>
    void count(C votes) {
        positive += votes > 0;
        negative += votes < 0;
    }
};

// Note that the elements [begin, end) must be written again if cancelled votes turn out negative.
inline void revise(std::vector<Revision>& revisions, std::size_t row, std::int64_t begin, std::int64_t end) {
    // Neighbours are joined, but not into pieces too long to be shared out between threads; where there are very many,
    // so are those that lie near each other.
    constexpr std::size_t many = 1 << 18;
    constexpr std::int64_t longest = 64 * chunk;
    const std::int64_t near = revisions.size() < many ? 0 : 2 * chunk;
    if (!revisions.empty()) {
        Revision& last = revisions.back();
        if (last.row == row && begin - last.end <= near && end - last.begin <= longest) {
            last.end = end;
            return;
        }
    }
    revisions.push_back({row, begin, end});
}

// What survives of entry i of model K, by magnitude.
template <class C, std::size_t Count>
struct Trimmed {
    Key<C> low[Count], high[Count];
    C rescale[Count];

    template <std::size_t K>
    C survivor(C x, C base, std::int64_t) const {
        return task<true, true>(x, base, low[K], high[K], rescale[K]);
    }
};

// The same at random.
template <class C, std::size_t Count>
struct Drawn {
    const std::uint32_t* words[Count];
    std::uint32_t limit[Count];
    C rescale[Count];

    template <std::size_t K>
    C survivor(C x, C base, std::int64_t i) const {
        return drawn(rules::difference(x, base), words[K][i], limit[K], rescale[K]);
    }
};

// All of it in one loop: results are of the type S that inputs are read as.
template <Vote V, MergeFunc Func, class S, class C, class Kept, std::size_t... K>
void fuse(S* result, const S* base, const S* const* x, const Kept kept, const Numbers<C>& numbers, std::int64_t n,
          Votes& counted, Key<C>* cancelled, std::index_sequence<K...>) {
    const S* const in[] = {x[K]...};
    const C w[] = {numbers.weights[K]...}, d[] = {numbers.shares[K]...};
    const Key<C> zero = numbers.zero;
    const bool cancel = numbers.cancel;
    const C scaling = numbers.scaling;
    Votes counts;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
        const C b = widen<C>(base[i]);
        const auto consensus_of = [&](auto... t) {
            C votes{}, merged{}, divisor{};
            Key<C> agreed{};
            (elect<V>(votes, t, w[K]), ...);
            const Key<C> sign = V == Vote::none ? 0 : sign_of(votes, zero);
            (fold<V, Func>(merged, divisor, agreed, sign, t, w[K], d[K]), ...);
            if constexpr (V != Vote::none) {
                counts.count(votes);
                cancelled[i] = has_cancelled(votes, agreed);
            }
            return settled<V, Func>(b, merged, divisor, votes, cancel, scaling);
        };
        narrow(result[i], consensus_of(kept.template survivor<K>(widen<C>(in[K][i]), b, i)...));
    }
    counted.positive += counts.positive;
    counted.negative += counts.negative;
}

// The same in steps, from and to the first-level cache, for any number of models.
template <Vote V, class C, std::size_t... K>
void elect_all(C* votes, C* const* t, const C* weight, std::int64_t n, std::index_sequence<K...>) {
    const C* const in[] = {t[K]...};
    const C w[] = {weight[K]...};
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
        C sum = votes[i];
        (elect<V>(sum, in[K][i], w[K]), ...);
        votes[i] = sum;
    }
}

template <Vote V, MergeFunc Func, class C, std::size_t... K>
void fold_all(C* merged, C* divisors, Key<C>* agreed, const C* votes, Key<C> zero, C* const* t, const C* weight,
              const C* share, std::int64_t n, std::index_sequence<K...>) {
    const C* const in[] = {t[K]...};
    const C w[] = {weight[K]...}, d[] = {share[K]...};
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
        const Key<C> sign = V == Vote::none ? 0 : sign_of(votes[i], zero);
        C sum = merged[i], divisor = divisors[i];
        Key<C> any = agreed[i];
        (fold<V, Func>(sum, divisor, any, sign, in[K][i], w[K], d[K]), ...);
        agreed[i] = any;
        merged[i] = sum;
        divisors[i] = divisor;
    }
}

template <Vote V, MergeFunc Func, class S, class C>
void settle_all(C* result, const S* base, const C* merged, const C* divisors, const C* votes, bool cancel, C scaling,
                std::int64_t n) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i)
        result[i] = settled<V, Func>(widen<C>(base[i]), merged[i], divisors[i], votes[i], cancel, scaling);
}

// Call `body` with a vote and a merge function known at compile time.
template <class Body>
void with_rule(const Plan& plan, Body body) {
    const auto with = [&](auto vote) {
        switch (plan.merge) {
            case MergeFunc::sum: return body(vote, std::integral_constant<MergeFunc, MergeFunc::sum>{});
            case MergeFunc::mean: return body(vote, std::integral_constant<MergeFunc, MergeFunc::mean>{});
            case MergeFunc::max: return body(vote, std::integral_constant<MergeFunc, MergeFunc::max>{});
        }
    };
    switch (plan.vote) {
        case Vote::none: return with(std::integral_constant<Vote, Vote::none>{});
        case Vote::total: return with(std::integral_constant<Vote, Vote::total>{});
        case Vote::weighted_total: return with(std::integral_constant<Vote, Vote::weighted_total>{});
        case Vote::frequency: return with(std::integral_constant<Vote, Vote::frequency>{});
    }
}

// Zeros in the place of a base: without one, models are task vectors themselves.
template <class S>
const S* no_base() {
    static const S zeros[chunk] = {};
    return zeros;
}

// Which rules have a loop of their own over so many models: each is code that grows with all of them.
constexpr bool is_fused(bool random, std::size_t models, Vote vote, MergeFunc func) {
    if (func == MergeFunc::max) return false;
    return !random || (models <= 4 && (vote == Vote::none || vote == Vote::total));
}

template <class S, class C>
class Consensus {
   public:
    Consensus(const Range& range, const Plan& plan, std::size_t row, int zero, Tally& tally)
        : survivors_(range, plan, row),
          plan_(plan),
          row_(row),
          tally_(tally),
          models_(survivors_.tasks.models()),
          numbers_(plan, row, models_, zero) {}

    // n results from `begin`, in steps.
    void operator()(std::int64_t begin, std::int64_t n, C* result) {
        survivors_.load(begin, n);
        C* const* t = survivors_.tasks.t.data();
        for (C* row : {rows_[merged], rows_[divided], rows_[voting]}) std::fill_n(row, n, C{});
        std::fill_n(cancelled_, n, Key<C>{});
        with_rule(plan_, [&](auto vote, auto func) {
            by_fours(models_, [&](std::size_t k, auto models) {
                elect_all<vote>(rows_[voting], t + k, &numbers_.weights[k], n, models);
            });
            by_fours(models_, [&](std::size_t k, auto models) {
                fold_all<vote, func>(rows_[merged], rows_[divided], cancelled_, rows_[voting], numbers_.zero, t + k,
                                     &numbers_.weights[k], &numbers_.shares[k], n, models);
            });
            if (vote != Vote::none) {
                Votes votes;
                for (std::int64_t i = 0; i < n; ++i) {
                    votes.count(rows_[voting][i]);
                    cancelled_[i] = has_cancelled(rows_[voting][i], cancelled_[i]);
                }
                tally(votes, begin, n);
            }
            settle_all<vote, func>(result, base(), rows_[merged], rows_[divided], rows_[voting], numbers_.cancel,
                                   numbers_.scaling, n);
        });
        if (tally_.kept != nullptr) count_survivors(n);
    }

    // n results from `begin`, in one loop; for `Count` models.
    template <std::size_t Count>
    void fused(std::int64_t begin, std::int64_t n, S* result) {
        survivors_.tasks.read(begin, n);
        Votes votes;
        if (plan_.random.keys != nullptr) {
            Drawn<C, Count> kept;
            for (std::size_t k = 0; k < Count; ++k) {
                kept.words[k] = survivors_.words(k, begin, n);
                kept.limit[k] = survivors_.limit(k);
                kept.rescale[k] = survivors_.drawn_rescale(k);
            }
            fuse_from(0, n, result, kept, votes);
        } else {
            Trimming<C>& trimming = survivors_.trimming;
            for (std::int64_t from = begin, to; from < begin + n; from = to) {
                to = trimming.settle(from, begin + n);
                Trimmed<C, Count> kept;
                for (std::size_t k = 0; k < Count; ++k) {
                    kept.low[k] = trimming.intervals[k].low;
                    kept.high[k] = trimming.intervals[k].high;
                    kept.rescale[k] = trimming.rescale[k];
                }
                fuse_from(from - begin, to - from, result, kept, votes);
            }
        }
        if (plan_.vote != Vote::none) tally(votes, begin, n);
    }

    void ask_for(std::int64_t begin) const {
        for (std::size_t k = 0; k < models_ + plan_.based; ++k) survivors_.tasks.ask_for(k, begin, piece);
    }

   private:
    const S* base() const { return plan_.based ? survivors_.tasks.base() : no_base<S>(); }

    // n results of the chunk last read, from its element `at`.
    template <template <class, std::size_t> class Kept, std::size_t Count>
    void fuse_from(std::int64_t at, std::int64_t n, S* result, const Kept<C, Count>& kept, Votes& votes) {
        const S* x[Count];
        for (std::size_t k = 0; k < Count; ++k) x[k] = survivors_.tasks.inputs()[k] + at;
        const S* b = plan_.based ? base() + at : base();
        with_rule(plan_, [&](auto vote, auto func) {
            if constexpr (is_fused(std::is_same_v<Kept<C, Count>, Drawn<C, Count>>, Count, vote, func))
                fuse<vote, func>(result + at, b, x, kept, numbers_, n, votes, cancelled_ + at,
                                 std::make_index_sequence<Count>{});
        });
    }

    void tally(const Votes& votes, std::int64_t begin, std::int64_t n) {
        tally_.positive += votes.positive;
        tally_.negative += votes.negative;
        if (std::accumulate(cancelled_, cancelled_ + n, Key<C>{}) == 0) return;
        for (std::int64_t from = 0; from < n; from += piece) {
            const std::int64_t to = std::min(from + piece, n);
            const Key<C> cancelled = std::accumulate(cancelled_ + from, cancelled_ + to, Key<C>{});
            tally_.cancelled += cancelled;
            if (cancelled > 0 && tally_.to_revise != nullptr) revise(*tally_.to_revise, row_, begin + from, begin + to);
        }
    }

    void count_survivors(std::int64_t n) {
        std::uint8_t up[chunk] = {}, down[chunk] = {};
        for (std::size_t k = 0; k < models_; ++k) {
            const C* t = survivors_.tasks.t[k];
            std::int64_t kept = 0;
            for (std::int64_t i = 0; i < n; ++i) {
                kept += t[i] != 0;
                up[i] |= t[i] > 0;
                down[i] |= t[i] < 0;
            }
            tally_.kept[k] += kept;
        }
        for (std::int64_t i = 0; i < n; ++i) tally_.conflicts += up[i] & down[i];
    }

    static constexpr std::int64_t piece = 64;  // elements that are revised together
    enum { merged, divided, voting };
    Survivors<S, C> survivors_;
    const Plan& plan_;
    std::size_t row_;
    Tally& tally_;
    std::size_t models_;
    Numbers<C> numbers_;
    Rows<C> rows_{3};
    alignas(line) Key<C> cancelled_[chunk];  // whether votes cancelled; before that, whether any model agreed
};

// Whether a range can be merged in one loop: the case that must be as fast as memory.
template <class S>
bool is_usual(const Range& range, const Plan& plan, std::size_t row, const Tally& tally) {
    const std::size_t models = range.width - plan.based;
    if (range.output.address == 0 || range.output.dtype != dtype_of<S> || tally.kept != nullptr) return false;
    const bool random = plan.random.keys != nullptr;
    if (models > group || !is_fused(random, models, plan.vote, plan.merge)) return false;
    const double* density = plan.random.density + row * models;
    const auto none_or_all = [](double p) { return p <= 0 || p >= 1; };
    return !random || (plan.random.epsilon == nullptr && std::none_of(density, density + models, none_or_all));
}

inline void consensus(const Range* ranges, std::size_t count, const Plan& plan, std::size_t row, int zero,
                      Tally& tally) {
    const Range& first = ranges[0];
    with_types(first, true, [&](auto stored, auto computed) {
        using S = decltype(stored);
        using C = decltype(computed);
        Consensus<S, C> rule(first, plan, row, zero, tally);
        if constexpr (!std::is_same_v<S, double>) {
            const auto fuse = [&](auto models) {
                constexpr std::size_t ahead = 8;  // pieces that are revised lie far apart
                for (std::size_t i = 0; i < count; ++i) {
                    if (i + ahead < count) rule.ask_for(ranges[i + ahead].begin);
                    for_chunks<S>(ranges[i], [&](std::int64_t begin, std::int64_t n, S* out) {
                        rule.template fused<models>(begin, n, out);
                    });
                }
            };
            if (is_usual<S>(first, plan, row, tally)) {
                static_assert(group == 8);
                switch (first.width - plan.based) {
                    case 1: return fuse(std::integral_constant<std::size_t, 1>{});
                    case 2: return fuse(std::integral_constant<std::size_t, 2>{});
                    case 3: return fuse(std::integral_constant<std::size_t, 3>{});
                    case 4: return fuse(std::integral_constant<std::size_t, 4>{});
                    case 5: return fuse(std::integral_constant<std::size_t, 5>{});
                    case 6: return fuse(std::integral_constant<std::size_t, 6>{});
                    case 7: return fuse(std::integral_constant<std::size_t, 7>{});
                    default: return fuse(std::integral_constant<std::size_t, 8>{});
                }
            }
        }
        alignas(line) C unwritten[chunk];
        for (std::size_t i = 0; i < count; ++i) {
            const Range& range = ranges[i];
            if (range.output.address != 0)
                for_chunks<C>(range, [&](std::int64_t begin, std::int64_t n, C* out) { rule(begin, n, out); });
            else
                for (std::int64_t begin = range.begin; begin < range.end; begin += chunk)
                    rule(begin, std::min(chunk, range.end - begin), unwritten);
        }
    });
}
