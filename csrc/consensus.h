// The arithmetic of one entry of a consensus: what survives of a task vector, the vote on its sign, and the merge.
//
// Included within a namespace, once for each instruction set and for devices, with <limits>, <type_traits> and
// <utility>. A magnitude is compared by the bits of |t|, which as integers are in the order of the numbers, so that a
// cut needs no rounding of its own and NaN stands above infinity.

template <class C>
using Key =
    std::conditional_t<sizeof(C) == 8, std::int64_t, std::conditional_t<sizeof(C) == 4, std::int32_t, std::int16_t>>;

template <class C>
constexpr Key<C> highest = std::numeric_limits<Key<C>>::max();

template <class C>
ISTHMUS_RULE Key<C> magnitude(C x) {
    return bit_cast<Key<C>>(x) & highest<C>;
}

// `x` where `mask` is all ones, zero where it is 0.
template <class C>
ISTHMUS_RULE C masked(C x, Key<C> mask) {
    return bit_cast<C>(bit_cast<Key<C>>(x) & mask);
}

// The magnitudes that survive: low <= |t| <= high.
template <class C>
struct Interval {
    Key<C> low = 0, high = highest<C>;
};

// The smallest number of type C that is not below a magnitude, and whether it equals it.
template <class C>
ISTHMUS_RULE std::pair<Key<C>, bool> ceiling(double value) {
    const C nearest = static_cast<C>(value);
    const Key<C> bits = magnitude(nearest) + (static_cast<double>(nearest) < value);
    return {bits, static_cast<double>(nearest) == value};
}

// What survives of the elements before, or from, the index of a cut.
template <class C>
ISTHMUS_RULE Interval<C> interval(double keep, bool before_keep, double drop, bool before_drop) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    if (keep == infinity && !before_keep) return {1, 0};
    const auto [low, low_equal] = ceiling<C>(keep);
    Interval<C> kept{low + (low_equal && !before_keep), highest<C>};
    if (drop != infinity || before_drop) {
        const auto [high, high_equal] = ceiling<C>(drop);
        kept.high = high - !(high_equal && !before_drop);
    }
    return kept;
}

// One entry of a task vector, or zero where it does not survive.
template <bool Based, bool Trim, class C>
ISTHMUS_RULE C task(C x, C base, Key<C> low, Key<C> high, C rescale) {
    const C t = Based ? rules::difference(x, base) : x;
    if constexpr (!Trim) return t;
    const Key<C> size = magnitude(t);
    return masked(rules::scaled(rescale, t), -Key<C>((size >= low) & (size <= high)));
}

// One entry where survivors are drawn at random.
template <class C>
ISTHMUS_RULE C drawn(C t, std::uint32_t word, std::uint32_t limit, C rescale) {
    return masked(rules::scaled(rescale, t), -Key<C>(word < limit));
}

// Add one model's survivor to the vote.
template <Vote V, class C>
ISTHMUS_RULE void elect(C& votes, C survivor, C weight) {
    if constexpr (V == Vote::none) return;
    const C term = V == Vote::weighted_total ? rules::scaled(weight, survivor) : survivor;
    // NaN has no sign: it stays what it is.
    votes += V != Vote::frequency ? term : term > 0 ? C{1} : term < 0 ? C{-1} : term;
}

// The bits of the sign of a vote, `zero` being those of a vote that cancelled.
template <class C>
ISTHMUS_RULE Key<C> sign_of(C votes, Key<C> zero) {
    return votes == 0 ? zero : bit_cast<Key<C>>(votes) & ~highest<C>;
}

// Fold one model's survivor into the merge where it agrees with the elected sign, or where it is not zero; `agreed`
// collects whether any does, as bits.
template <Vote V, MergeFunc Func, class C>
ISTHMUS_RULE void fold(C& merged, C& divisor, Key<C>& agreed, Key<C> sign, C survivor, C weight, C share) {
    const C term = rules::scaled(weight, survivor);
    const C voting = V == Vote::weighted_total ? term : survivor;
    const bool agree = V == Vote::none ? voting != 0 : bit_cast<C>(bit_cast<Key<C>>(voting) ^ sign) > 0;
    agreed |= Key<C>{agree};
    if constexpr (Func == MergeFunc::max) {
        const C candidate = V == Vote::none ? term : bit_cast<C>(magnitude(term) | sign);
        merged = agree & (magnitude(term) > magnitude(merged)) ? candidate : merged;
        return;
    }
    merged = agree ? merged + term : merged;
    if constexpr (Func == MergeFunc::mean) divisor = agree ? divisor + share : divisor;
}

// Divide by the divisor, scale, and add to the base; `cancel` says that cancelled votes elect nothing.
template <Vote V, MergeFunc Func, class C>
ISTHMUS_RULE C settled(C base, C merged, C divisor, C votes, bool cancel, C scaling) {
    if constexpr (Func == MergeFunc::mean) merged = merged / (divisor == 0 ? C{1} : divisor);
    if constexpr (V == Vote::none) return rules::applied(base, scaling, merged);
    merged = cancel & (votes == 0) ? C{} : merged;
    const C out = rules::applied(base, scaling, merged);
    return votes != votes ? votes : out;
}

// Whether votes cancelled. Both signs were among them: whichever was elected, one of them agreed.
template <class C>
ISTHMUS_RULE Key<C> has_cancelled(C votes, Key<C> agreed) {
    return (votes == 0) & (agreed != 0);
}
