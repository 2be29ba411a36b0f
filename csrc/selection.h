// The k-th largest of many magnitudes: what a team of threads does on the way.
//
// Magnitudes are compared by the bits of |t|, keys that as integers are in their order. Bodies that the host can run,
// too; `Key` is a signed integer, and keys(i) gives the i-th of n.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "dtypes.h"
#include "team.h"

namespace isthmus {

constexpr int digit_bits = 11;
constexpr int digits = 1 << digit_bits;

// A magnitude, and how many of those looked at lie above and at it.
template <class Key>
struct Ranked {
    Key value;
    std::int64_t above, equal;
};

// The equal parts of a range of keys that a digit tells apart.
template <class Key>
struct Parts {
    Key low, high;
    int shift = 0;

    ISTHMUS_BODY Parts(Key from, Key to) : low(from), high(to) {
        while (((high - low) >> shift) >= digits) ++shift;
    }
    ISTHMUS_BODY bool holds(Key key) const { return key >= low && key <= high; }
    ISTHMUS_BODY int digit_of(Key key) const { return static_cast<int>((key - low) >> shift); }
    // The keys of one part.
    ISTHMUS_BODY Key first(int digit) const { return static_cast<Key>(low + (static_cast<Key>(digit) << shift)); }
    ISTHMUS_BODY Key last(int digit) const {
        const Key end = static_cast<Key>(first(digit) + static_cast<Key>((std::int64_t{1} << shift) - 1));
        return end < high && end >= first(digit) ? end : high;
    }
};

// One digit step: of counts by digit, which part holds the k-th largest (k from 1, counted within the range), how many
// lie in the parts above, and how many in it. Counts may be of any integer type; all threads are told.
struct Step {
    int digit;
    std::int64_t above, inside;
    ISTHMUS_BODY bool operator<(const Step& other) const { return digit < other.digit; }
};
template <class Team, class Count>
ISTHMUS_BODY Step digit_step(const Team& team, const Count* counts, std::int64_t k) {
    // Each thread takes neighbouring digits, from the highest; the one whose digits the rank falls into finds it.
    const int share = (digits + team.size() - 1) / team.size();
    const int from = team.rank() * share, to = from + share < digits ? from + share : digits;
    std::int64_t mine = 0, total = 0;
    for (int i = from; i < to; ++i) mine += counts[digits - 1 - i];
    std::int64_t above = team.place(mine, total);
    Step found{digits, 0, 0};
    if (above < k && k <= above + mine) {
        int i = from;
        for (; above + counts[digits - 1 - i] < k; ++i) above += counts[digits - 1 - i];
        found = {digits - 1 - i, above, static_cast<std::int64_t>(counts[digits - 1 - i])};
    }
    return team.least(found);
}

// The k-th largest of the keys in [low, high], k from 1 and counted among those; `counts` is memory that the team
// shares.
template <class Key, class Team, class Keys>
ISTHMUS_BODY Ranked<Key> kth_largest(const Team& team, const Keys& keys, std::int64_t n, std::int64_t k, Key low,
                                     Key high, std::uint32_t* counts) {
    std::int64_t above = 0, equal = 0;
    for (bool first = true; first || low < high; first = false) {
        const Parts<Key> parts(low, high);
        for (int i = team.rank(); i < digits; i += team.size()) counts[i] = 0;
        team.sync();
        for (std::int64_t i = team.rank(); i < n; i += team.size()) {
            const Key key = keys(i);
            if (parts.holds(key)) team.add(counts + parts.digit_of(key), std::uint32_t{1});
        }
        team.sync();
        const Step step = digit_step(team, counts, k - above);
        if (step.digit == digits) return {high, above, 0};  // fewer than k; some are not finite
        above += step.above;
        equal = step.inside;
        low = parts.first(step.digit);
        high = parts.last(step.digit);
    }
    return {low, above, equal};
}

// The index of the nth key, from 1, for which matches(i) holds, plus one; or 0 where there are fewer.
template <class Team, class Matches>
ISTHMUS_BODY std::int64_t after_nth(const Team& team, const Matches& matches, std::int64_t n, std::int64_t nth) {
    for (std::int64_t begin = 0; begin < n; begin += team.size()) {
        const std::int64_t i = begin + team.rank();
        const std::int64_t hit = i < n && matches(i);
        std::int64_t total = 0;
        const std::int64_t before = team.place(hit, total);
        if (nth > total) {
            nth -= total;
            continue;
        }
        const std::int64_t none = std::numeric_limits<std::int64_t>::max();
        return team.least(hit && before == nth - 1 ? i + 1 : none);
    }
    return 0;
}

// Where the k-th largest of n keys lies, almost surely: between two keys of a sample of m of them.
template <class Key>
struct Bracket {
    Key low = 0, high = infinite<Key>;
};
constexpr double bracket_margin = 5;  // standard deviations of a sampled rank

template <class Key, class Team, class Keys>
ISTHMUS_BODY Bracket<Key> bracket_of(const Team& team, const Keys& sample, std::int64_t m, std::int64_t k,
                                     std::int64_t n, std::uint32_t* counts) {
    const double p = static_cast<double>(k) / static_cast<double>(n), expected = p * static_cast<double>(m);
    const double spread = bracket_margin * std::sqrt(expected * (1 - p)) + 1;
    constexpr Key most = std::numeric_limits<Key>::max();  // of NaN
    Bracket<Key> bracket;
    if (expected - spread >= 0) {
        const auto rank = static_cast<std::int64_t>(expected - spread) + 1;
        const Key high = kth_largest<Key>(team, sample, m, rank, Key{0}, most, counts).value;
        if (high < bracket.high) bracket.high = high;
    }
    if (expected + spread < static_cast<double>(m)) {
        const auto rank = static_cast<std::int64_t>(expected + spread) + 1;
        const Key low = kth_largest<Key>(team, sample, m, rank, Key{0}, most, counts).value;
        bracket.low = low < bracket.high ? low : bracket.high;
    }
    return bracket;
}

// What a sweep counts for one bracket: magnitudes above it, at its ends (of equal ends the higher), and inside, which
// are kept where there is room.
struct Sorted {
    std::int64_t above, at_high, inside, at_low;
};

// What follows from a sweep.
enum class Finding : std::uint8_t { at_high, inside, at_low, above, below };
ISTHMUS_BODY Finding finding_of(const Sorted& sorted, std::int64_t k) {
    if (k <= sorted.above) return Finding::above;
    k -= sorted.above;
    if (k <= sorted.at_high) return Finding::at_high;
    k -= sorted.at_high;
    if (k <= sorted.inside) return Finding::inside;
    return k - sorted.inside <= sorted.at_low ? Finding::at_low : Finding::below;
}

}  // namespace isthmus
