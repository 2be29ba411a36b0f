// Exact selection of the k-th largest magnitude, without sorting.
//
// A sample gives each rank a bracket that almost surely holds its magnitude. One sweep counts what lies above and at
// the ends of the bracket and keeps what lies inside; the answer is at an end or among the kept. Where the bracket
// missed, or held more than memory allows, a sweep counts the magnitudes by range until it is narrow enough.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "work.h"

namespace isthmus::cpu {

namespace {

constexpr std::int64_t run = 8;                   // elements sampled at one place: neighbours are alike
constexpr std::int64_t fewest = 1 << 13;          // elements of a group that is sampled
constexpr std::int64_t largest_sample = 1 << 22;  // of all models together
constexpr double margin = 6;                      // standard deviations of a sampled rank
constexpr std::int64_t kept_bytes = 3 << 23;      // beside one hundredth of a model

struct Piece {
    std::size_t row;
    std::int64_t begin, end;  // elements of the row
};

using Place = std::pair<std::size_t, std::size_t>;  // row and model

template <class Key>
using Value = std::conditional_t<sizeof(Key) == 8, double, std::conditional_t<sizeof(Key) == 4, float, bf16>>;

// One rank of one model: the magnitude looked for lies in [low, high].
template <class Key>
struct Search {
    std::size_t model, rank;
    std::int64_t k;
    Key low = 0, high = infinite<Key>;
    // The answer.
    bool done = false;
    Key value = 0;
    std::int64_t above = 0, equal = 0, index = std::numeric_limits<std::int64_t>::max();
};

// How many magnitudes of [low, high] lie in each of its equal parts, and how many lie above it.
template <class Key>
class Histogram {
   public:
    Histogram(Key low, Key high) : low_(low), high_(high), counts_(bins + 1) {
        while (((high - low) >> shift_) >= bins) ++shift_;
    }

    void add(const Key* keys, std::int64_t n) {
        for (std::int64_t j = 0; j < n; ++j)
            if (keys[j] >= low_) ++counts_[keys[j] > high_ ? bins : (keys[j] - low_) >> shift_];
    }

    void add(const Histogram& other) {
        for (int bin = 0; bin <= bins; ++bin) counts_[bin] += other.counts_[bin];
    }

    // The part that holds the k-th largest, which is in [low, high], and how many lie in and above the part.
    struct Part {
        Key low, high;
        std::int64_t count, above;
    };
    Part part_of(std::int64_t k) const {
        std::int64_t above = counts_[bins];
        int bin = bins - 1;
        for (; bin > 0 && above + counts_[bin] < k; --bin) above += counts_[bin];
        const Key low = low_ + (Key(bin) << shift_);
        const Key high = low + std::min<Key>(high_ - low, (Key{1} << shift_) - 1);
        return {low, high, counts_[bin], above};
    }

    static constexpr int bins = 1 << 10;  // soon cleared, and small beside a cache

   private:
    Key low_, high_;
    int shift_ = 0;
    std::vector<std::int64_t> counts_;
};

// A magnitude, and how many lie above and at it.
template <class Key>
struct Ranked {
    Key value;
    std::int64_t above, equal;
};

// The k-th largest of several arrays, which is in [low, high]. Of many, a count by range leaves few to compare.
template <class Key>
Ranked<Key> kth_largest(const std::vector<std::pair<const Key*, std::int64_t>>& arrays, std::int64_t k, Key low,
                        Key high) {
    typename Histogram<Key>::Part part{low, high, 0, 0};
    for (const auto& array : arrays) part.count += array.second;
    if (part.count > Histogram<Key>::bins) {
        Histogram<Key> histogram(low, high);
        for (const auto& [keys, n] : arrays) histogram.add(keys, n);
        part = histogram.part_of(k);
    }
    std::vector<Key> near(part.count + 1);
    Key* to = near.data();
    for (const auto& [keys, n] : arrays)
        for (std::int64_t j = 0; j < n; ++j) {  // written without a branch, and again unless it is near
            *to = keys[j];
            to += (keys[j] >= part.low) & (keys[j] <= part.high);
        }
    const auto place = near.begin() + (k - part.above - 1);
    std::nth_element(near.begin(), place, near.end() - 1, std::greater<>{});
    const Key value = *place;
    return {value, part.above + std::count_if(near.begin(), place, [&](Key key) { return key > value; }),
            std::count(near.begin(), near.end() - 1, value)};
}

// Selection within one group, whose elements are `pieces` in order.
template <class Key>
class Group {
   public:
    Group(const Table& table, bool based, const std::vector<Piece>& pieces, std::int64_t model_bytes, int threads)
        : table_(table), based_(based), models_(table.width - based), model_bytes_(model_bytes) {
        std::int64_t bytes = 0;
        for (const Piece& piece : pieces) {
            for (std::int64_t begin = piece.begin; begin < piece.end; begin += segment)
                segments_.push_back({piece.row, begin, std::min(begin + segment, piece.end)});
            for (std::size_t k = 0; k < table.width; ++k)
                bytes += (piece.end - piece.begin) * size_of(table.row(piece.row)[k].dtype);
            elements_ += piece.end - piece.begin;
        }
        threads_ = std::min<std::int64_t>(useful_threads(bytes, threads), segments_.size());
    }

    std::int64_t elements() const { return elements_; }

    // Find what is searched for; or nothing, where a magnitude is not finite: then its first row and model.
    std::optional<Place> find(std::vector<Search<Key>>& searches, bool exact) {
        guess(searches);
        for (bool first = true;; first = false) {
            std::vector<Search<Key>*> open;
            for (Search<Key>& s : searches)
                if (!s.done) open.push_back(&s);
            if (open.empty()) return std::nullopt;
            if (!first) narrow(open);
            if (const auto bad = sweep(open, exact)) return bad;
        }
    }

    // The first row with a magnitude of `model` that is not finite.
    std::size_t bad_row(std::size_t model) const {
        for (const Piece& s : segments_)
            for (std::int64_t begin = s.begin; begin < s.end; begin += chunk)
                for (const Key key : keys(s, begin, model))
                    if (key >= infinite<Key>) return s.row;
        return segments_[0].row;
    }

   private:
    static const SelectionLoops<Key>& loop() { return std::get<SelectionLoops<Key>>(loops().selection); }

    Range range(const Piece& s) const {
        return {table_.row(s.row), table_.width, Operand{0, Dtype::f32}, s.begin, s.end, false};
    }

    // The magnitudes of one chunk of one model.
    std::vector<Key> keys(const Piece& s, std::int64_t begin, std::size_t model) const {
        std::vector<std::vector<Key>> all(models_, std::vector<Key>(std::min(chunk, s.end - begin)));
        std::vector<Key*> out;
        for (auto& of : all) out.push_back(of.data());
        loop().sample(range(s), based_, &begin, 1, chunk, out.data());
        return all[model];
    }

    // Guess a bracket for each search from runs of elements, one at random in each of as many equal parts.
    void guess(std::vector<Search<Key>>& searches) const {
        if (elements_ < fewest) return;  // all magnitudes are soon kept
        // A sample of m leaves about n / sqrt(m) magnitudes in a bracket. This m keeps the time for both small, and the
        // bracket of a large group within what may be kept.
        const double n = elements_, m = 0.4 * std::sqrt(n * std::sqrt(n));
        const std::int64_t wanted =
            std::min<std::int64_t>(m, std::max<std::int64_t>(largest_sample / models_, 1 << 10)) / run;
        const std::int64_t stride = elements_ / wanted;
        std::vector<std::vector<std::int64_t>> starts(segments_.size());
        std::int64_t sampled = 0, segment_start = 0;
        std::size_t s = 0;
        std::uint64_t state = 0x9E3779B97F4A7C15;
        for (std::int64_t i = 0; i < wanted; ++i) {
            state = state * 6364136223846793005 + 1442695040888963407;
            const std::int64_t at = (i * stride + std::int64_t(state >> 33) % stride) / run * run;
            while (at >= segment_start + segments_[s].end - segments_[s].begin) {
                segment_start += segments_[s].end - segments_[s].begin;
                ++s;
            }
            starts[s].push_back(segments_[s].begin + at - segment_start);
            sampled += std::min(run, segments_[s].end - starts[s].back());
        }
        std::vector<std::int64_t> offset(segments_.size() + 1);
        for (std::size_t i = 0; i < segments_.size(); ++i) {
            offset[i + 1] = offset[i];
            for (const std::int64_t start : starts[i]) offset[i + 1] += std::min(run, segments_[i].end - start);
        }
        std::vector<std::vector<Key>> keys(models_, std::vector<Key>(sampled));
        run_parallel(threads_, [&](int k) {
            const std::size_t from = segments_.size() * k / threads_, to = segments_.size() * (k + 1) / threads_;
            for (std::size_t i = from; i < to; ++i) {
                std::vector<Key*> out;
                for (auto& of : keys) out.push_back(of.data() + offset[i]);
                loop().sample(range(segments_[i]), based_, starts[i].data(), starts[i].size(), run, out.data());
            }
        });
        run_parallel(std::min<std::int64_t>(threads_, models_), [&](int k) {
            for (std::size_t model = k; model < models_; model += std::min<std::int64_t>(threads_, models_))
                for (Search<Key>& search : searches)
                    if (search.model == model && !search.done) bracket(search, keys[model]);
        });
    }

    void bracket(Search<Key>& search, const std::vector<Key>& keys) const {
        const double n = keys.size(), p = static_cast<double>(search.k) / elements_;
        const double spread = margin * std::sqrt(p * (1 - p) * n) + 1;
        const auto at = [&](double rank) {  // the magnitude of a rank from the largest, counted from 0
            const Key most = std::numeric_limits<Key>::max();  // of NaN
            const auto found = kth_largest<Key>({{keys.data(), keys.size()}}, std::int64_t(rank) + 1, 0, most);
            return std::min(found.value, infinite<Key>);
        };
        if (p * n - spread >= 0) search.high = at(p * n - spread);
        if (p * n + spread < n) search.low = at(p * n + spread);
    }

    // What one sweep found for one search in one segment.
    struct Found {
        std::int64_t at_high = 0, at_low = 0, kept_until = 0;
    };

    // Sweep over all elements once for the open searches; those that end in their brackets are done.
    std::optional<Place> sweep(const std::vector<Search<Key>*>& open, bool exact) {
        std::vector<std::size_t> first(models_ + 1, 0);
        for (const Search<Key>* s : open) ++first[s->model + 1];
        for (std::size_t k = 0; k < models_; ++k) first[k + 1] += first[k];  // searches are sorted by model

        struct Thread {
            std::vector<Bracket<Key>> brackets;
            std::vector<std::unique_ptr<Key[]>> kept;
            std::vector<Key> top;
        };
        std::vector<Thread> parts(threads_);
        std::vector<Found> found(exact ? segments_.size() * open.size() : 0);
        const std::int64_t share = (kept_bytes + model_bytes_ / 100) / (sizeof(Key) * open.size() * threads_);
        run_parallel(threads_, [&](int t) {
            Thread& part = parts[t];
            const std::size_t from = segments_.size() * t / threads_, to = segments_.size() * (t + 1) / threads_;
            std::int64_t mine = 0;
            for (std::size_t i = from; i < to; ++i) mine += segments_[i].end - segments_[i].begin;
            for (const Search<Key>* s : open) {
                Bracket<Key> bracket;
                bracket.low = s->low;
                bracket.high = s->high;
                bracket.capacity = std::min(share, mine);
                part.kept.emplace_back(new Key[bracket.capacity + 1]);
                bracket.found = part.kept.back().get();
                part.brackets.push_back(bracket);
            }
            part.top.assign(models_, 0);
            for (std::size_t i = from; i < to; ++i) {
                std::vector<Found> before(exact ? open.size() : 0);
                for (std::size_t b = 0; b < before.size(); ++b)
                    before[b] = {part.brackets[b].at_high, part.brackets[b].at_low, part.brackets[b].count};
                loop().sweep(range(segments_[i]), based_, part.brackets.data(), first.data(), part.top.data());
                for (std::size_t b = 0; b < before.size(); ++b)
                    found[i * open.size() + b] = {part.brackets[b].at_high - before[b].at_high,
                                                  part.brackets[b].at_low - before[b].at_low, part.brackets[b].count};
            }
        });
        std::optional<Place> bad;
        for (std::size_t k = 0; k < models_; ++k) {
            bool finite = true;
            for (const Thread& part : parts) finite &= part.top[k] < infinite<Key>;
            if (finite || first[k + 1] == first[k]) continue;
            const Place place{bad_row(k), k};
            if (!bad || place < *bad) bad = place;
        }
        if (bad) return bad;

        run_parallel(std::min<std::int64_t>(threads_, open.size()), [&](int t) {
            for (std::size_t b = t; b < open.size(); b += std::min<std::int64_t>(threads_, open.size())) {
                Search<Key>& s = *open[b];
                std::vector<const Bracket<Key>*> brackets;
                for (const Thread& part : parts) brackets.push_back(&part.brackets[b]);
                settle(s, brackets);
                if (!s.done || !exact || s.equal == s.k - s.above) continue;
                locate(s, [&](std::size_t i) {
                    const Found& here = found[i * open.size() + b];
                    if (s.value == s.high) return here.at_high;
                    if (s.value == s.low) return here.at_low;
                    const std::size_t owner = owner_of(i);
                    const bool continues = i > 0 && owner_of(i - 1) == owner;
                    const Key* kept = brackets[owner]->found;
                    const std::int64_t from = continues ? found[(i - 1) * open.size() + b].kept_until : 0;
                    return static_cast<std::int64_t>(std::count(kept + from, kept + here.kept_until, s.value));
                });
            }
        });
        return std::nullopt;
    }

    std::size_t owner_of(std::size_t segment_index) const {
        std::size_t t = 0;
        while (segment_index >= segments_.size() * (t + 1) / threads_) ++t;
        return t;
    }

    // Conclude from what a sweep found; a search that is not done has a better range afterwards.
    void settle(Search<Key>& s, const std::vector<const Bracket<Key>*>& brackets) const {
        std::int64_t above = 0, at_high = 0, at_low = 0, inside = 0;
        bool whole = true;
        for (const Bracket<Key>* b : brackets) {
            above += b->above;
            at_high += b->at_high;
            at_low += b->at_low;
            inside += b->count;
            whole &= b->count <= b->capacity;
        }
        const auto answer = [&](Key value, std::int64_t more, std::int64_t equal) {
            s.value = value;
            s.above = more;
            s.equal = equal;
            s.done = true;
        };
        if (s.k <= above) {
            s.low = s.high;
            s.high = infinite<Key>;
        } else if (s.k <= above + at_high) {
            answer(s.high, above, at_high);
        } else if (s.k <= above + at_high + inside) {
            if (!whole) return;
            std::vector<std::pair<const Key*, std::int64_t>> kept;
            for (const Bracket<Key>* b : brackets) kept.emplace_back(b->found, b->count);
            const auto [value, more, equal] = kth_largest(kept, s.k - above - at_high, s.low, s.high);
            answer(value, above + at_high + more, equal);
        } else if (s.k <= above + at_high + inside + at_low) {
            answer(s.low, above + at_high + inside, at_low);
        } else {
            s.high = s.low;
            s.low = 0;
        }
    }

    // Where the last of the equal magnitudes that are kept lies; equal_in(segment) says how many there are.
    template <class EqualIn>
    void locate(Search<Key>& s, EqualIn equal_in) const {
        std::int64_t left = s.k - s.above, before = 0;
        for (std::size_t i = 0; i < segments_.size(); ++i) {
            const Piece& piece = segments_[i];
            const std::int64_t equal = equal_in(i);
            if (left > equal) {
                left -= equal;
                before += piece.end - piece.begin;
                continue;
            }
            for (std::int64_t begin = piece.begin; begin < piece.end; begin += chunk) {
                const std::vector<Key> of = keys(piece, begin, s.model);
                for (std::size_t j = 0; j < of.size(); ++j)
                    if (of[j] == s.value && --left == 0) {
                        s.index = before + (begin - piece.begin) + j + 1;
                        return;
                    }
            }
        }
    }

    // Count magnitudes by range within each open search's, and keep the range that holds its rank.
    void narrow(const std::vector<Search<Key>*>& open) const {
        constexpr std::size_t at_once = 64;  // searches, so that the counts stay small
        for (std::size_t first = 0; first < open.size(); first += at_once)
            narrow(&open[first], std::min(at_once, open.size() - first));
    }

    void narrow(Search<Key>* const* open, std::size_t searches) const {
        std::vector<std::vector<Histogram<Key>>> counts(threads_);
        run_parallel(threads_, [&](int t) {
            for (std::size_t s = 0; s < searches; ++s) counts[t].emplace_back(open[s]->low, open[s]->high);
            std::vector<Key> keys(models_ * chunk);
            std::vector<Key*> of;
            for (std::size_t k = 0; k < models_; ++k) of.push_back(&keys[k * chunk]);
            for (std::size_t i = segments_.size() * t / threads_; i < segments_.size() * (t + 1) / threads_; ++i)
                for (std::int64_t begin = segments_[i].begin; begin < segments_[i].end; begin += chunk) {
                    const std::int64_t n = std::min(chunk, segments_[i].end - begin);
                    loop().sample(range(segments_[i]), based_, &begin, 1, chunk, of.data());
                    for (std::size_t s = 0; s < searches; ++s) counts[t][s].add(of[open[s]->model], n);
                }
        });
        for (std::size_t s = 0; s < searches; ++s) {
            for (int t = 1; t < threads_; ++t) counts[0][s].add(counts[t][s]);
            const auto part = counts[0][s].part_of(open[s]->k);
            open[s]->low = part.low;
            open[s]->high = part.high;
        }
    }

    const Table& table_;
    bool based_;
    std::size_t models_;
    std::int64_t model_bytes_, elements_ = 0;
    int threads_;
    std::vector<Piece> segments_;
};

template <class Key>
Selection select_by(const Table& table, bool based, const std::vector<std::vector<Piece>>& groups, const Ranks& ranks,
                    int threads) {
    constexpr std::int64_t all = std::numeric_limits<std::int64_t>::max();
    const std::size_t models = table.width - based, size = groups.size() * models * ranks.count;
    Selection result;
    result.value.assign(size, 0);
    for (auto* of : {&result.index, &result.above, &result.equal}) of->assign(size, 0);
    std::int64_t model_bytes = 0;
    for (std::size_t r = 0; r < table.rows(); ++r)
        model_bytes += table.numel[r] * size_of(table.row(r)[table.width - 1].dtype);

    const auto do_group = [&](std::size_t g, int with_threads) -> std::optional<Place> {
        Group<Key> group(table, based, groups[g], model_bytes, with_threads);
        std::vector<Search<Key>> searches;
        for (std::size_t k = 0; k < models; ++k)
            for (std::size_t q = 0; q < ranks.count; ++q) {
                const std::size_t at = (g * models + k) * ranks.count + q;
                if (ranks.of[at] <= 0) {
                    result.value[at] = std::numeric_limits<double>::infinity();
                } else if (ranks.of[at] >= group.elements()) {
                    result.index[at] = all;
                    result.equal[at] = group.elements();
                } else {
                    searches.push_back({k, q, ranks.of[at]});
                }
            }
        if (searches.empty()) return std::nullopt;
        if (const auto bad = group.find(searches, ranks.exact)) return bad;
        for (const Search<Key>& s : searches) {
            const std::size_t at = (g * models + s.model) * ranks.count + s.rank;
            result.value[at] = widen<double>(bit_cast<Value<Key>>(s.value));
            result.index[at] = s.index;
            result.above[at] = s.above;
            result.equal[at] = s.equal;
        }
        return std::nullopt;
    };
    std::optional<Place> bad;
    const auto note = [&](const std::optional<Place>& place) {
        if (place && (!bad || *place < *bad)) bad = place;
    };

    // Large groups are swept by all threads, small ones by one thread each.
    std::vector<std::size_t> small;
    std::int64_t small_bytes = 0;
    for (std::size_t g = 0; g < groups.size(); ++g) {
        std::int64_t bytes = 0;
        for (const Piece& piece : groups[g]) bytes += (piece.end - piece.begin) * table.width * 4;
        if (useful_threads(bytes, threads) > 1) {
            note(do_group(g, threads));
        } else {
            small.push_back(g);
            small_bytes += bytes;
        }
    }
    const int parts =
        std::min<std::int64_t>(useful_threads(small_bytes, threads), std::max<std::size_t>(small.size(), 1));
    std::vector<std::optional<Place>> bad_of(parts);
    run_parallel(parts, [&](int t) {
        for (std::size_t i = t; i < small.size(); i += parts) {
            const auto place = do_group(small[i], 1);
            if (place && (!bad_of[t] || *place < *bad_of[t])) bad_of[t] = place;
        }
    });
    for (const auto& place : bad_of) note(place);
    if (bad) {
        result.bad_row = bad->first;
        result.bad_model = bad->second;
    }
    return result;
}

}  // namespace

Selection select(const Table& table, bool based, bool whole, const std::int64_t* lengths, const Ranks& ranks,
                 int threads) {
    const DefaultFloatEnvironment environment;
    std::vector<std::vector<Piece>> groups;
    if (whole) groups.emplace_back();
    bool is_double = false, is_bf16 = !based;
    for (std::size_t r = 0; r < table.rows(); ++r) {
        if (whole) {
            groups[0].push_back({r, 0, table.numel[r]});
        } else if (lengths == nullptr) {
            groups.push_back({{r, 0, table.numel[r]}});
        } else {
            for (std::int64_t begin = 0; begin < table.numel[r]; begin += lengths[r])
                groups.push_back({{r, begin, begin + lengths[r]}});
        }
        for (const Operand* x = table.row(r); x != table.row(r + 1); ++x) {
            is_double |= x->dtype == Dtype::f64;
            is_bf16 &= x->dtype == Dtype::bf16;
        }
    }
    if (is_double) return select_by<std::int64_t>(table, based, groups, ranks, threads);
    if (is_bf16) return select_by<std::int16_t>(table, based, groups, ranks, threads);
    return select_by<std::int32_t>(table, based, groups, ranks, threads);
}

}  // namespace isthmus::cpu
