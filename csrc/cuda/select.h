// Selection over rows of tensors: what one block of threads does in each step.
//
// A group that fits is ranked by one block from beginning to end. Large groups are ranked by all blocks together, in
// steps that follow each other on the stream: a sample gives each search a bracket; one sweep counts what lies above,
// at and below it and keeps what lies inside; of these the rank is found. A search whose bracket missed, or held more
// than there is memory for, goes on by digits, one sweep for each. Searches that are done cost nothing more.
#pragma once

#include "../selection.h"
#include "rows.h"

namespace isthmus::cuda {

// One rank of one model of a large group.
template <class Key>
struct Search {
    std::int64_t k;                 // counted among all
    std::int64_t above;             // magnitudes above `high`, where the search goes on by digits
    std::int64_t equal;             // once it is done
    std::int64_t sorted[4];         // what the sweep counted, as Sorted
    std::int64_t kept;              // keys offered to `found`
    Key low, high;                  // the magnitude looked for lies between
    std::int32_t open, exact_from;  // whether it is looked for; whether the index of equal ones is
};

// A batch of large groups, and memory for their searches: [group of the batch][model][rank].
template <class Key>
struct Batch {
    Ranking ranking;
    const Large* large;  // the first of the batch
    std::int64_t groups, blocks;
    std::int64_t sample;    // keys of each group and model
    std::int64_t capacity;  // keys kept for each search
    Search<Key>* searches;
    std::int64_t* counts;  // [search][digit]
    Key* found;            // [search][capacity]: kept keys; before that the sample, after it counts of equal ones

    ISTHMUS_BODY std::int64_t per_group() const { return ranking.models * ranking.ranks; }
    ISTHMUS_BODY std::int64_t total() const { return groups * per_group(); }
    // A sample serves all ranks of its model: it lies where the first of them keeps its keys.
    ISTHMUS_BODY Key* sample_of(std::int64_t search) const {
        return found + search / ranking.ranks * ranking.ranks * capacity;
    }
    ISTHMUS_BODY std::uint32_t* equal_of(std::int64_t search) const {
        return reinterpret_cast<std::uint32_t*>(found + search * capacity);
    }
    // The large group that a block, counted from the first of the batch, belongs to.
    ISTHMUS_BODY std::int64_t group_of(std::int64_t block) const {
        std::int64_t low = 0, high = groups - 1;
        while (low < high) {
            const std::int64_t middle = (low + high + 1) / 2;
            if (large[middle].before - large[0].before <= block)
                low = middle;
            else
                high = middle - 1;
        }
        return low;
    }
};

// The last row that begins at or before a place.
ISTHMUS_BODY std::int64_t last_before(const std::int64_t* starts, std::int64_t rows, std::int64_t place) {
    std::int64_t low = 0, high = rows - 1;
    while (low < high) {
        const std::int64_t middle = (low + high + 1) / 2;
        if (starts[middle] <= place)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

template <class Key, class S>
ISTHMUS_BODY Key key_of(S x, S base, bool based) {
    if constexpr (sizeof(Key) < 4) {
        return magnitude(x);
    } else {
        using C = Computed<S>;
        return magnitude(based ? rules::difference(widen<C>(x), widen<C>(base)) : widen<C>(x));
    }
}

// The magnitudes of a model from an element of a row.
template <class Key, class S>
struct RowKeys {
    const S *x, *base;
    ISTHMUS_BODY RowKeys(const Rows& rows, bool based, std::int64_t row, std::int64_t model, std::int64_t begin) {
        const std::int64_t* addresses = rows.addresses + row * (rows.width + 1);
        x = reinterpret_cast<const S*>(addresses[model + based]) + begin;
        base = based ? reinterpret_cast<const S*>(addresses[0]) + begin : nullptr;
    }
    ISTHMUS_BODY Key operator()(std::int64_t i) const {
        return key_of<Key>(x[i], base != nullptr ? base[i] : S{}, base != nullptr);
    }
};

template <class Key>
ISTHMUS_BODY double value_of(Key key) {
    if constexpr (sizeof(Key) == 8) return bit_cast<double>(key);
    if constexpr (sizeof(Key) == 4) return widen<double>(bit_cast<float>(key));
    if constexpr (sizeof(Key) == 2) return widen<double>(bit_cast<bf16>(key));
}

// The results of a rank that selects nothing or everything, or one of n keys that was found.
ISTHMUS_BODY void write_rank(const Ranking& ranking, std::int64_t at, double value, std::int64_t index,
                             std::int64_t above, std::int64_t equal) {
    ranking.value[at] = value;
    ranking.index[at] = index;
    ranking.above[at] = above;
    ranking.equal[at] = equal;
}
ISTHMUS_BODY bool write_trivial(const Ranking& ranking, std::int64_t at, std::int64_t n) {
    const std::int64_t k = ranking.k[at];
    if (k <= 0) {
        write_rank(ranking, at, std::numeric_limits<double>::infinity(), 0, 0, 0);
        return true;
    }
    if (k >= n) write_rank(ranking, at, 0, std::numeric_limits<std::int64_t>::max(), 0, n);
    return k >= n;
}

// --- small groups
// -----------------------------------------------------------------------------------------------------

// One model of one group, of which no row is a large group.
template <class Key, class S, class Team>
ISTHMUS_BODY void select_small(const Team& team, const Rows& rows, const Ranking& ranking, std::int64_t item,
                               std::uint32_t* counts) {
    const std::int64_t group = item / ranking.models, model = item % ranking.models;
    const std::int64_t row = last_before(ranking.first_group, rows.rows, group);
    const std::int64_t length = ranking.lengths != nullptr ? ranking.lengths[row] : rows.numel[row];
    if (length == rows.numel[row] && length > most_small) return;
    const RowKeys<Key, S> keys(rows, ranking.based, row, model, (group - ranking.first_group[row]) * length);
    bool checked = false;
    for (std::int64_t q = 0; q < ranking.ranks; ++q) {
        const std::int64_t at = item * ranking.ranks + q, k = ranking.k[at];
        if (k <= 0 || k >= length) {
            if (team.rank() == 0) write_trivial(ranking, at, length);
            continue;
        }
        if (!checked) {
            bool finite = true;
            for (std::int64_t i = team.rank(); i < length; i += team.size()) finite &= keys(i) < infinite<Key>;
            if (!finite) team.minimum(ranking.nonfinite, row * ranking.models + model);
            checked = true;
        }
        const Ranked<Key> found = kth_largest<Key>(team, keys, length, k, Key{0}, infinite<Key>, counts);
        std::int64_t index = std::numeric_limits<std::int64_t>::max();
        if (ranking.exact && found.equal > k - found.above)
            index = after_nth(team, [&](std::int64_t i) { return keys(i) == found.value; }, length, k - found.above);
        if (team.rank() == 0) write_rank(ranking, at, value_of(found.value), index, found.above, found.equal);
    }
}

// --- large groups
// -----------------------------------------------------------------------------------------------------

template <class Key>
ISTHMUS_BODY void begin_search(const Batch<Key>& batch, std::int64_t s) {
    const Large& large = batch.large[s / batch.per_group()];
    const std::int64_t at = large.group * batch.per_group() + s % batch.per_group();
    Search<Key> search{};
    search.k = batch.ranking.k[at];
    search.high = infinite<Key>;
    search.open = !write_trivial(batch.ranking, at, large.elements);
    batch.searches[s] = search;
}

// One key of the sample: elements in runs of neighbours, one run at random in each of as many equal parts.
constexpr std::int64_t sample_run = 8;

template <class Key, class S>
ISTHMUS_BODY void take_sample(const Rows& rows, const Batch<Key>& batch, std::int64_t item) {
    const std::int64_t i = item % batch.sample, l = item / batch.sample;
    const Large& large = batch.large[l];
    const std::int64_t stride = large.elements / (batch.sample / sample_run), run = i / sample_run;
    std::uint64_t random = static_cast<std::uint64_t>(run + 1) * 0x9E3779B97F4A7C15;
    random = (random ^ random >> 32) * 0xD6E8FEB86659FD93;
    random ^= random >> 32;
    const std::int64_t places = stride - sample_run + 1;
    const std::int64_t place = run * stride + static_cast<std::int64_t>(random % places) + i % sample_run;
    const std::int64_t first = rows.row_of_block[large.first_block];
    std::int64_t row = first, at = place;
    if (batch.ranking.whole) {
        row = last_before(batch.ranking.row_starts, rows.rows, place);
        at = place - batch.ranking.row_starts[row];
    }
    for (std::int64_t model = 0; model < batch.ranking.models; ++model)
        batch.sample_of(l * batch.per_group() + model * batch.ranking.ranks)[i] =
            RowKeys<Key, S>(rows, batch.ranking.based, row, model, at)(0);
}

template <class Key, class Team>
ISTHMUS_BODY void bracket_search(const Team& team, const Batch<Key>& batch, std::int64_t s, std::uint32_t* counts) {
    Search<Key>& search = batch.searches[s];
    if (!search.open) return;
    const Key* sample = batch.sample_of(s);
    const std::int64_t n = batch.large[s / batch.per_group()].elements;
    const Bracket<Key> bracket =
        bracket_of<Key>(team, [&](std::int64_t i) { return sample[i]; }, batch.sample, search.k, n, counts);
    if (team.rank() != 0) return;
    search.low = bracket.low;
    search.high = bracket.high;
}

// Call body(key) for every magnitude of a model that this thread looks at in a block.
template <class Key, class S, class Team, class Body>
ISTHMUS_BODY void for_keys(const Team& team, const Block& block, bool based, std::int64_t model, Body body) {
    constexpr int at_once = per_access<S>;
    ISTHMUS_UNROLL_BY_4
    for (std::int32_t i = team.rank() * at_once; i < block.n; i += team.size() * at_once) {
        const Vector<S> x = load<S>(block.addresses[model + based], block.begin + i, block.n - i, block.aligned);
        Vector<S> base{};
        if (based) base = load<S>(block.addresses[0], block.begin + i, block.n - i, block.aligned);
        ISTHMUS_UNROLL
        for (int e = 0; e < at_once; ++e)
            if (i + e < block.n) body(key_of<Key>(x.x[e], base.x[e], based));
    }
}

// Sort the magnitudes of one block into the brackets of its group.
template <class Key, class S, class Team>
ISTHMUS_BODY void sort_block(const Team& team, const Rows& rows, const Batch<Key>& batch, std::int64_t w) {
    const std::int64_t l = batch.group_of(w);
    const Large& large = batch.large[l];
    const Block block(rows, large.first_block + w - (large.before - batch.large[0].before));
    const Ranking& ranking = batch.ranking;
    ISTHMUS_ROLLED
    for (std::int64_t j = 0; j < batch.per_group(); ++j) {
        const std::int64_t s = l * batch.per_group() + j, model = j / ranking.ranks;
        Search<Key>& search = batch.searches[s];
        if (!search.open) continue;
        const Key low = search.low, high = search.high;
        // Four counts of up to a block's elements in one number.
        std::uint64_t counts = 0;
        bool finite = true;
        for_keys<Key, S>(team, block, ranking.based, model, [&](Key key) {
            const bool inside = key > low && key < high;
            counts += std::uint64_t{key > high} | std::uint64_t{key == high} << 16 | std::uint64_t{inside} << 32 |
                      std::uint64_t{key == low && low != high} << 48;
            finite &= key < infinite<Key>;
        });
        if (!finite) team.minimum(ranking.nonfinite, block.row * ranking.models + model);
        std::uint64_t total = 0;
        const std::uint64_t before = team.place(counts, total);
        const auto field = [](std::uint64_t of, int f) { return static_cast<std::int64_t>(of >> 16 * f & 0xffff); };
        if (team.rank() == 0)
            for (int f = 0; f < 4; ++f)
                if (field(total, f) != 0) team.add(&search.sorted[f], field(total, f));
        if (field(total, 2) == 0) continue;
        const std::int64_t start =
            team.sum(team.rank() == 0 ? team.add(&search.kept, field(total, 2)) : std::int64_t{0});
        if (start + field(total, 2) > batch.capacity || field(counts, 2) == 0) continue;
        Key* to = batch.found + s * batch.capacity + start + field(before, 2);
        for_keys<Key, S>(team, block, ranking.based, model, [&](Key key) {
            if (key > low && key < high) *to++ = key;
        });
    }
}

// Conclude from what the sweep found; a search that is not done has a range for digits afterwards.
template <class Key, class Team>
ISTHMUS_BODY void conclude(const Team& team, const Batch<Key>& batch, std::int64_t s, std::uint32_t* counts,
                           std::int64_t* open) {
    Search<Key>& search = batch.searches[s];
    if (!search.open) return;
    const Sorted sorted{search.sorted[0], search.sorted[1], search.sorted[2], search.sorted[3]};
    const Finding finding = finding_of(sorted, search.k);
    const bool whole = search.kept <= batch.capacity;
    const std::int64_t from_high = sorted.above + sorted.at_high;
    Ranked<Key> found{};
    if (finding == Finding::at_high) found = {search.high, sorted.above, sorted.at_high};
    if (finding == Finding::at_low) found = {search.low, from_high + sorted.inside, sorted.at_low};
    if (finding == Finding::inside && whole) {
        const Key* kept = batch.found + s * batch.capacity;
        found = kth_largest<Key>(
            team, [&](std::int64_t i) { return kept[i]; }, sorted.inside, search.k - from_high, search.low, search.high,
            counts);
        found.above += from_high;
    }
    team.sync();
    if (team.rank() != 0) return;
    if (finding == Finding::at_high || finding == Finding::at_low || (finding == Finding::inside && whole)) {
        search.open = 0;
        search.low = search.high = found.value;
        search.above = found.above;
        search.equal = found.equal;
        search.exact_from = batch.ranking.exact && found.equal > search.k - found.above;
        return;
    }
    team.add(open, std::int64_t{1});
    search.above = sorted.above;
    if (finding == Finding::above) {
        search.low = search.high;
        search.high = infinite<Key>;
        search.above = 0;
    } else if (finding == Finding::below) {
        if (search.low != search.high) search.above = from_high + sorted.inside;
        search.high = search.low;
        search.low = 0;
    }
}

// Count by digits of the ranges of the searches that are open: the blocks [from, to) of the batch.
template <class Key, class S, class Team>
ISTHMUS_BODY void count_digits(const Team& team, const Rows& rows, const Batch<Key>& batch, std::int64_t from,
                               std::int64_t to, std::uint32_t* counts) {
    while (from < to) {
        const std::int64_t l = batch.group_of(from);
        const Large& large = batch.large[l];
        const std::int64_t first = large.before - batch.large[0].before;
        const std::int64_t end = first + large.blocks < to ? first + large.blocks : to;
        ISTHMUS_ROLLED
        for (std::int64_t j = 0; j < batch.per_group(); ++j) {
            const std::int64_t s = l * batch.per_group() + j;
            const Search<Key>& search = batch.searches[s];
            if (!search.open) continue;
            const Parts<Key> parts(search.low, search.high);
            for (int i = team.rank(); i < digits; i += team.size()) counts[i] = 0;
            team.sync();
            ISTHMUS_ROLLED
            for (std::int64_t w = from; w < end; ++w)
                for_keys<Key, S>(team, Block(rows, large.first_block + w - first), batch.ranking.based,
                                 j / batch.ranking.ranks, [&](Key key) {
                                     if (parts.holds(key)) team.add(counts + parts.digit_of(key), std::uint32_t{1});
                                 });
            team.sync();
            for (int i = team.rank(); i < digits; i += team.size())
                if (counts[i] != 0) team.add(batch.counts + s * digits + i, std::int64_t{counts[i]});
            team.sync();
        }
        from = end;
    }
}

// Narrow the range of a search to one digit; its counts are cleared for the next.
template <class Key, class Team>
ISTHMUS_BODY void narrow_search(const Team& team, const Batch<Key>& batch, std::int64_t s, std::int64_t* open) {
    Search<Key>& search = batch.searches[s];
    if (!search.open) return;
    std::int64_t* counts = batch.counts + s * digits;
    const Parts<Key> parts(search.low, search.high);
    const Step step = digit_step(team, counts, search.k - search.above);
    for (int i = team.rank(); i < digits; i += team.size()) counts[i] = 0;
    team.sync();
    if (team.rank() != 0) return;
    if (step.digit < digits) {
        search.low = parts.first(step.digit);
        search.high = parts.last(step.digit);
        search.above += step.above;
        search.equal = step.inside;
    } else {
        search.low = search.high;  // some are not finite
    }
    if (search.low < search.high) return;
    search.open = 0;
    search.exact_from = batch.ranking.exact && search.equal > search.k - search.above;
    team.add(open, std::int64_t{-1});
}

// Count the magnitudes of one block that equal what was found, for searches of which only the first ones belong.
template <class Key, class S, class Team>
ISTHMUS_BODY void count_equal(const Team& team, const Rows& rows, const Batch<Key>& batch, std::int64_t w) {
    const std::int64_t l = batch.group_of(w);
    const Large& large = batch.large[l];
    const std::int64_t place = w - (large.before - batch.large[0].before);
    ISTHMUS_ROLLED
    for (std::int64_t j = 0; j < batch.per_group(); ++j) {
        const std::int64_t s = l * batch.per_group() + j;
        const Search<Key>& search = batch.searches[s];
        if (!search.exact_from) continue;
        const Key value = search.low;
        std::uint32_t equal = 0;
        for_keys<Key, S>(team, Block(rows, large.first_block + place), batch.ranking.based, j / batch.ranking.ranks,
                         [&](Key key) { equal += key == value; });
        equal = team.sum(equal);
        if (team.rank() == 0) batch.equal_of(s)[place] = equal;
    }
}

// Write what a search found, with the index after the last of the equal ones that belong.
template <class Key, class S, class Team>
ISTHMUS_BODY void finish_search(const Team& team, const Rows& rows, const Batch<Key>& batch, std::int64_t s) {
    const Search<Key>& search = batch.searches[s];
    const Ranking& ranking = batch.ranking;
    const std::int64_t j = s % batch.per_group();
    const Large& large = batch.large[s / batch.per_group()];
    if (search.k <= 0 || search.k >= large.elements) return;  // written when it began
    std::int64_t index = std::numeric_limits<std::int64_t>::max();
    if (search.exact_from) {
        const std::uint32_t* equal = batch.equal_of(s);
        std::int64_t left = search.k - search.above, block = 0;
        // The block that holds the last: its threads look at neighbouring blocks together.
        for (std::int64_t begin = 0; begin < large.blocks; begin += team.size()) {
            const std::int64_t i = begin + team.rank();
            const std::int64_t mine = i < large.blocks ? equal[i] : 0;
            std::int64_t total = 0;
            const std::int64_t before = team.place(mine, total);
            if (left > total) {
                left -= total;
                continue;
            }
            const bool here = before < left && left <= before + mine;
            block = team.sum(here ? i : std::int64_t{0});
            left = team.sum(here ? left - before : std::int64_t{0});
            break;
        }
        const Block of(rows, large.first_block + block);
        const RowKeys<Key, S> keys(rows, ranking.based, of.row, j / ranking.ranks, of.begin);
        index = after_nth(team, [&](std::int64_t i) { return keys(i) == search.low; }, of.n, left);
        index += of.begin + (ranking.whole ? ranking.row_starts[of.row] : 0);
    }
    if (team.rank() == 0)
        write_rank(ranking, large.group * batch.per_group() + j, value_of(search.low), index, search.above,
                   search.equal);
}

}  // namespace isthmus::cuda
