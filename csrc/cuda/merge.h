// The consensus over one block of a row.
//
// The usual cases keep all task vectors of an entry in registers, for up to eight models; everything else reads the
// inputs twice, to vote and to merge, the second time from a cache.
#pragma once

#include "rows.h"

namespace isthmus::cuda {

// The magnitudes of one model that survive in the elements [from, until) of a block.
template <class C>
struct Kept {
    Interval<C> interval;
    std::int32_t from = 0, until = 0;
};
constexpr std::int32_t block_end = std::numeric_limits<std::int32_t>::max();

// Those that survive at an element of a block that begins at `begin`, and how far they do.
template <class C>
ISTHMUS_APART Kept<C> kept_at(const Plan& plan, std::int64_t row, int model, int models, std::int64_t begin,
                              std::int32_t element) {
    const std::int64_t at = begin + element;
    const std::int64_t length = plan.lengths != nullptr ? plan.lengths[row] : 0;
    const std::int64_t group = length > 0 ? at / length : 0, start = group * length;
    const std::int64_t cut = (plan.first_group[row] + group) * models + model;
    std::int64_t left = length > 0 ? start + length - at : block_end;  // elements that it holds for
    const auto before = [&](const Cuts& cuts) {
        const std::int64_t to_cut = cuts.index[cut] - (at - start);
        if (to_cut > 0 && to_cut < left) left = to_cut;
        return to_cut > 0;
    };
    const bool before_keep = before(plan.keep), dropping = plan.drop.value != nullptr;
    const bool before_drop = dropping && before(plan.drop);
    const double drop = dropping ? plan.drop.value[cut] : std::numeric_limits<double>::infinity();
    const std::int32_t until = left < block_end - element ? element + static_cast<std::int32_t>(left) : block_end;
    return {interval<C>(plan.keep.value[cut], before_keep, drop, before_drop), element, until};
}

// The random words of `N` entries from `first`, an index in the whole tensor.
template <int N>
ISTHMUS_BODY void random_words(const std::int64_t* key, std::int64_t first, std::uint32_t (&words)[N]) {
    const KeySchedule<std::uint64_t> keys(static_cast<std::uint32_t>(key[0]), static_cast<std::uint32_t>(key[1]));
    const std::uint64_t c2 = key[2], c3 = key[3];
    const int skip = first % 4;
    std::uint64_t block = first / 4;
    ISTHMUS_UNROLL
    for (int from = 0; from < N + 3; from += 4, ++block) {  // entry `from - skip` begins a block of four words
        if (from - skip >= N) break;
        const Words<std::uint64_t> w = philox<std::uint64_t>({block, block >> 32, c2, c3}, keys);
        const std::uint64_t four[] = {w.x0, w.x1, w.x2, w.x3};
        ISTHMUS_UNROLL
        for (int e = 0; e < N; ++e) ISTHMUS_UNROLL
        for (int j = 0; j < 4; ++j)
            if (from - skip + j == e) words[e] = static_cast<std::uint32_t>(four[j]);
    }
}

// What survives of one model's entries.
template <class S, bool AtRandom>
class Survivors {
   public:
    using C = Computed<S>;
    static constexpr int at_once = per_access<S>;

    ISTHMUS_BODY Survivors(const Plan& plan, const Block& block, int models)
        : plan_(plan), block_(block), models_(models) {}

    // The numbers of a model that hold for the whole row, and what survived where it was last looked at.
    struct Model {
        C rescale = 1;
        Kept<C> kept;
        std::uint32_t limit = 0;
        bool all = true, none = false;
    };

    ISTHMUS_BODY Model model(int k) const {
        Model m;
        const std::int64_t at = block_.row * models_ + k;
        if (plan_.rescale != nullptr) m.rescale = static_cast<C>(plan_.rescale[at]);
        if constexpr (AtRandom) {
            const double density = plan_.random.density[at];
            m.all = density >= 1;
            m.none = density <= 0;
            if (m.all || m.none) return m;
            m.limit = static_cast<std::uint32_t>(density * 0x1p32);
            if (plan_.random.inverse) m.rescale = static_cast<C>(1 / density);
        } else if (plan_.keep.value == nullptr) {
            m.kept.until = block_end;
        }
        return m;
    }

    // Survivors of model k among `count` entries from element i of the block; zeros after them.
    ISTHMUS_BODY void take(int k, Model& m, std::int32_t i, std::int32_t count, const Vector<S>& x,
                           const C (&base)[at_once], C (&t)[at_once]) const {
        if constexpr (AtRandom) {
            std::uint32_t words[at_once] = {};
            const std::int64_t at = block_.row * models_ + k;
            if (!m.all && !m.none)
                random_words(plan_.random.keys + 4 * at, plan_.random.starts[block_.row] + block_.begin + i, words);
            ISTHMUS_UNROLL
            for (int e = 0; e < at_once; ++e) {
                const C whole = plan_.based ? rules::difference(widen<C>(x.x[e]), base[e]) : widen<C>(x.x[e]);
                t[e] = m.none  ? C{}
                       : m.all ? rules::scaled(m.rescale, whole)
                               : drawn(whole, words[e], m.limit, m.rescale);
            }
        } else {
            // Mostly once; again where an access lies across the end of a group, or a cut's index.
            const std::int32_t end = i + (count < at_once ? count : at_once);
            ISTHMUS_ROLLED
            for (std::int32_t at = i; at < end; at = m.kept.until) {
                if (at < m.kept.from || at >= m.kept.until)
                    m.kept = kept_at<C>(plan_, block_.row, k, models_, block_.begin, at);
                const Interval<C> interval = m.kept.interval;
                ISTHMUS_UNROLL
                for (int e = 0; e < at_once; ++e) {
                    const C value = widen<C>(x.x[e]);
                    const C kept = plan_.based
                                       ? task<true, true>(value, base[e], interval.low, interval.high, m.rescale)
                                       : task<false, true>(value, C{}, interval.low, interval.high, m.rescale);
                    t[e] = i + e >= at ? kept : t[e];
                }
            }
        }
        if (count < at_once) {
            ISTHMUS_UNROLL
            for (int e = 0; e < at_once; ++e)
                if (e >= count) t[e] = C{};
        }
    }

   private:
    const Plan& plan_;
    const Block& block_;
    int models_;
};

// What one thread counts.
struct Counted {
    std::uint32_t positive = 0, negative = 0, cancelled = 0, conflicts = 0;
};

// The options of a rule as constants.
template <Vote V, MergeFunc F>
struct Fixed {
    static constexpr bool votes = V != Vote::none;
    template <class C>
    ISTHMUS_BODY void vote(C& votes, C t, C weight) const {
        elect<V>(votes, t, weight);
    }
    template <class C>
    ISTHMUS_BODY void merge(C& merged, C& divisor, Key<C>& agreed, Key<C> sign, C t, C weight, C share) const {
        fold<V, F>(merged, divisor, agreed, sign, t, weight, share);
    }
    template <class C>
    ISTHMUS_BODY C settle(C base, C merged, C divisor, C votes, bool cancel, C scaling) const {
        return settled<V, F>(base, merged, divisor, votes, cancel, scaling);
    }
};

// The same, looked up for each entry.
struct Looked {
    static constexpr bool votes = true;
    Vote option;
    MergeFunc func;

    template <class Body>
    ISTHMUS_BODY void with(Body body) const {
        const auto with_func = [&](auto vote) {
            switch (func) {
                case MergeFunc::sum: return body(Fixed<vote, MergeFunc::sum>{});
                case MergeFunc::mean: return body(Fixed<vote, MergeFunc::mean>{});
                case MergeFunc::max: return body(Fixed<vote, MergeFunc::max>{});
            }
        };
        switch (option) {
            case Vote::none: return with_func(std::integral_constant<Vote, Vote::none>{});
            case Vote::total: return with_func(std::integral_constant<Vote, Vote::total>{});
            case Vote::weighted_total: return with_func(std::integral_constant<Vote, Vote::weighted_total>{});
            case Vote::frequency: return with_func(std::integral_constant<Vote, Vote::frequency>{});
        }
    }
};

// What a sweep does with the entries of one block: its signs, marks and counts.
template <class S, class Team>
class Outcome {
   public:
    using C = Computed<S>;

    ISTHMUS_BODY Outcome(const Rows& rows, const Sweep& sweep, const Block& block, std::int64_t b)
        : sweep_(sweep), row_(block.row), words_(b * mark_words_of_block(rows)) {
        const bool negative = sweep.decide != nullptr ? sweep.decide[sweep.by_row ? row_ : 0] <= 0 : sweep.zero < 0;
        idle_ = sweep.marked != nullptr && !negative;
        zero = negative ? ~highest<C> : 0;
        cancel = sweep.decide == nullptr && sweep.zero == 0;
    }

    Key<C> zero;
    bool cancel;

    // Whether there is nothing to do for the block, or for one access of it.
    ISTHMUS_BODY bool is_idle() const { return idle_; }
    ISTHMUS_BODY bool is_left_out(std::int32_t access) const {
        return sweep_.marked != nullptr && !(sweep_.marked[words_ + access / 32] >> access % 32 & 1);
    }

    ISTHMUS_BODY void note(const Team& team, std::int32_t access, bool any_cancelled) const {
        if (any_cancelled && sweep_.mark != nullptr)
            team.set_bits(sweep_.mark + words_ + access / 32, std::uint32_t{1} << access % 32);
    }

    ISTHMUS_BODY void finish(const Team& team, const Counted& counted) const {
        if (sweep_.count != nullptr)
            team.tally(sweep_.count + (sweep_.by_row ? row_ : 0),
                       std::int64_t{counted.positive} - std::int64_t{counted.negative});
        if (sweep_.counts == nullptr) return;
        std::int64_t* counts = sweep_.counts + 4 * row_;
        team.tally(counts, std::int64_t{counted.positive});
        team.tally(counts + 1, std::int64_t{counted.negative});
        team.tally(counts + 2, std::int64_t{counted.cancelled});
        team.tally(counts + 3, std::int64_t{counted.conflicts});
    }

   private:
    const Sweep& sweep_;
    std::int64_t row_, words_;
    bool idle_;
};

// For at most `Models` models, in registers. Survivors are not counted. A sum is a mean whose shares are zero: it is
// divided by one.
template <class S, Vote V, int Models, bool AtRandom, class Team>
ISTHMUS_BODY void consensus_block(const Team& team, const Rows& rows, const Plan& plan, const Sweep& sweep,
                                  std::int64_t b) {
    using C = Computed<S>;
    using Rule = Fixed<V, MergeFunc::mean>;
    constexpr int at_once = per_access<S>;
    const Block block(rows, b);
    const Outcome<S, Team> outcome(rows, sweep, block, b);
    if (outcome.is_idle()) return;
    const int models = rows.width - plan.based;
    const Survivors<S, AtRandom> survivors(plan, block, models);
    typename Survivors<S, AtRandom>::Model of[Models];
    C w[Models] = {}, d[Models] = {};
    ISTHMUS_UNROLL
    for (int k = 0; k < Models; ++k) {
        if (k >= models) break;
        const std::int64_t at = block.row * models + k;
        of[k] = survivors.model(k);
        w[k] = static_cast<C>(plan.weights[at]);
        d[k] = plan.merge == MergeFunc::sum ? C{} : plan.divisors != nullptr ? static_cast<C>(plan.divisors[at]) : C{1};
    }
    const C scaling = static_cast<C>(plan.scaling[block.row]);
    const Rule rule;
    Counted counted;
    ISTHMUS_ROLLED
    for (std::int32_t access = team.rank(); access * at_once < block.n; access += team.size()) {
        if (outcome.is_left_out(access)) continue;
        const std::int32_t i = access * at_once, count = block.n - i;
        Vector<S> base{}, x[Models];
        if (plan.based) base = load<S>(block.addresses[0], block.begin + i, count, block.aligned);
        ISTHMUS_UNROLL
        for (int k = 0; k < Models; ++k) {
            if (k >= models) break;
            x[k] = load<S>(block.addresses[k + plan.based], block.begin + i, count, block.aligned);
        }
        C from[at_once], t[Models][at_once] = {}, result[at_once];
        ISTHMUS_UNROLL
        for (int e = 0; e < at_once; ++e) from[e] = widen<C>(base.x[e]);
        ISTHMUS_UNROLL
        for (int k = 0; k < Models; ++k) {
            if (k >= models) break;
            survivors.take(k, of[k], i, count, x[k], from, t[k]);
        }
        bool any_cancelled = false;
        ISTHMUS_UNROLL
        for (int e = 0; e < at_once; ++e) {
            C votes{}, merged{}, divisor{};
            Key<C> agreed{};
            ISTHMUS_UNROLL
            for (int k = 0; k < Models; ++k) rule.vote(votes, t[k][e], w[k]);
            const Key<C> sign = V == Vote::none ? 0 : sign_of(votes, outcome.zero);
            ISTHMUS_UNROLL
            for (int k = 0; k < Models; ++k) rule.merge(merged, divisor, agreed, sign, t[k][e], w[k], d[k]);
            if constexpr (V != Vote::none) {
                counted.positive += votes > 0;
                counted.negative += votes < 0;
                any_cancelled |= has_cancelled(votes, agreed) != 0;
            }
            result[e] = rule.settle(from[e], merged, divisor, votes, outcome.cancel, scaling);
        }
        outcome.note(team, access, any_cancelled);
        if (sweep.write)
            store<S>(rows.out_dtype, block.addresses[rows.width], block.begin + i, result, count, block.aligned);
    }
    outcome.finish(team, counted);
}

// For any number of models and all options: the inputs are read once to vote and once to merge.
template <class S, bool AtRandom, class Team>
ISTHMUS_BODY void any_consensus_block(const Team& team, const Rows& rows, const Plan& plan, const Sweep& sweep,
                                      std::int64_t b) {
    using C = Computed<S>;
    constexpr int at_once = per_access<S>;
    const Block block(rows, b);
    const Outcome<S, Team> outcome(rows, sweep, block, b);
    if (outcome.is_idle()) return;
    const int models = rows.width - plan.based;
    const Survivors<S, AtRandom> survivors(plan, block, models);
    const C scaling = static_cast<C>(plan.scaling[block.row]);
    const bool by_vote = plan.vote != Vote::none;
    const Looked rule{plan.vote, plan.merge};
    Counted counted;
    // All threads take part in counting, those without an access too.
    ISTHMUS_ROLLED
    for (std::int32_t first = 0; first * at_once < block.n; first += team.size()) {
        const std::int32_t access = first + team.rank(), i = access * at_once, count = block.n - i;
        const bool idle = count <= 0 || outcome.is_left_out(access);
        C from[at_once] = {}, votes[at_once] = {}, merged[at_once] = {}, divisor[at_once] = {}, result[at_once];
        Key<C> agreed[at_once] = {};
        bool up[at_once] = {}, down[at_once] = {};
        if (plan.based && !idle) {
            const Vector<S> base = load<S>(block.addresses[0], block.begin + i, count, block.aligned);
            ISTHMUS_UNROLL
            for (int e = 0; e < at_once; ++e) from[e] = widen<C>(base.x[e]);
        }
        ISTHMUS_ROLLED
        for (int merging = by_vote ? 0 : 1; merging < 2; ++merging) ISTHMUS_ROLLED
        for (int k = 0; k < models; ++k) {
            std::uint32_t kept = 0;
            if (!idle) {
                const std::int64_t at = block.row * models + k;
                auto model = survivors.model(k);
                const Vector<S> x = load<S>(block.addresses[k + plan.based], block.begin + i, count, block.aligned);
                C t[at_once];
                survivors.take(k, model, i, count, x, from, t);
                const C w = static_cast<C>(plan.weights[at]);
                const C share = plan.divisors != nullptr ? static_cast<C>(plan.divisors[at]) : C{1};
                rule.with([&](auto fixed) {
                    ISTHMUS_UNROLL
                    for (int e = 0; e < at_once; ++e) {
                        if (merging == 0) {
                            fixed.vote(votes[e], t[e], w);
                        } else {
                            const Key<C> sign = by_vote ? sign_of(votes[e], outcome.zero) : 0;
                            fixed.merge(merged[e], divisor[e], agreed[e], sign, t[e], w, share);
                        }
                    }
                });
                ISTHMUS_UNROLL
                for (int e = 0; e < at_once; ++e) {
                    kept += t[e] != 0;
                    up[e] |= t[e] > 0;
                    down[e] |= t[e] < 0;
                }
            }
            if (merging == 1 && sweep.kept != nullptr)
                team.tally(sweep.kept + block.row * models + k, std::int64_t{kept});
        }
        if (idle) continue;
        std::uint32_t cancelled = 0;
        ISTHMUS_UNROLL
        for (int e = 0; e < at_once; ++e) {
            if (by_vote) {
                counted.positive += votes[e] > 0;
                counted.negative += votes[e] < 0;
                cancelled += has_cancelled(votes[e], agreed[e]) != 0;
            }
            counted.conflicts += up[e] & down[e];
        }
        counted.cancelled += cancelled;
        rule.with([&](auto fixed) {
            ISTHMUS_UNROLL
            for (int e = 0; e < at_once; ++e)
                result[e] = fixed.settle(from[e], merged[e], divisor[e], votes[e], outcome.cancel, scaling);
        });
        outcome.note(team, access, cancelled != 0);
        if (sweep.write)
            store<S>(rows.out_dtype, block.addresses[rows.width], block.begin + i, result, count, block.aligned);
    }
    outcome.finish(team, counted);
}

}  // namespace isthmus::cuda
