// Consensus over a table: one sweep, and a second one over the chunks where cancelled votes turn out negative.

#include <algorithm>

#include "work.h"

namespace isthmus::cpu {

namespace {

// What one thread counts, in all rows.
struct Counts {
    std::vector<Tally> rows;
    std::vector<std::int64_t> kept;
    std::vector<Revision> to_revise;
};

}  // namespace

Stats consensus(const Table& table, const Plan& given, bool wanted, int threads) {
    const auto loop = loops().consensus;
    Plan plan = given;
    const std::vector<std::int64_t> first_group = first_groups(table, plan.lengths);
    plan.first_group = first_group.data();
    const std::size_t rows = table.rows(), models = table.width - plan.based;
    // A group is ranked as a whole where it is first met: other threads must not have written to it, and meeting it
    // again for a revision would rank it again.
    const bool ranked = plan.random.epsilon != nullptr;
    if (ranked && in_place(table)) threads = 1;
    const bool majority = plan.vote != Vote::none && plan.zero_sign == ZeroSign::majority;

    std::vector<Counts> counts(std::max(threads, 1));
    const auto sweep = [&](const Table& over, int zero, bool note_kept, bool note_cancelled) {
        for (Counts& c : counts) {
            c.rows.assign(rows, Tally{});
            c.kept.assign(note_kept ? rows * models : 0, 0);
        }
        for_ranges(over, threads, [&](const Range& range, std::size_t r, int thread) {
            Counts& c = counts[thread];
            Tally& tally = c.rows[r];
            if (note_kept) tally.kept = &c.kept[r * models];
            if (note_cancelled) tally.to_revise = &c.to_revise;
            loop(&range, 1, plan, r, zero, tally);
        });
    };
    // Whether cancelled votes of each row are negative: a majority of nothing counts as negative.
    const auto negative_rows = [&] {
        std::vector<std::int64_t> sum(rows, 0);
        for (const Counts& c : counts)
            for (std::size_t r = 0; r < rows; ++r) sum[r] += c.rows[r].positive - c.rows[r].negative;
        if (!plan.tally_rows) {
            std::int64_t total = 0;
            for (const std::int64_t s : sum) total += s;
            std::fill(sum.begin(), sum.end(), total);
        }
        std::vector<char> negative(rows);
        for (std::size_t r = 0; r < rows; ++r) negative[r] = sum[r] <= 0;
        return negative;
    };

    const int sign = plan.zero_sign == ZeroSign::zero ? 0 : plan.zero_sign == ZeroSign::negative ? -1 : 1;
    if (!majority) {
        sweep(table, sign, wanted, false);
    } else if (!in_place(table) && !ranked) {
        sweep(table, 1, wanted, true);  // as if cancelled votes were positive
        const std::vector<char> negative = negative_rows();
        std::size_t revisions = 0;
        for (const Counts& c : counts) revisions += c.to_revise.size();
        if (revisions > 0) {
            const int parts = useful_threads(revisions * chunk * size_of(Dtype::f32) * table.width, threads);
            run_parallel(parts, [&](int k) {
                std::vector<Range> ranges;  // of one row
                for (const Counts& c : counts) {
                    const std::size_t to = c.to_revise.size() * (k + 1) / parts;
                    for (std::size_t i = c.to_revise.size() * k / parts; i < to; ++i) {
                        const Revision& v = c.to_revise[i];
                        if (negative[v.row])
                            ranges.push_back(
                                {table.row(v.row), table.width, table.outputs[v.row], v.begin, v.end, false});
                        if (ranges.empty() || (i + 1 < to && c.to_revise[i + 1].row == v.row)) continue;
                        Tally ignored;
                        loop(ranges.data(), ranges.size(), plan, v.row, -1, ignored);
                        ranges.clear();
                    }
                }
            });
        }
    } else {
        // The majority is counted first.
        Table unwritten = table;
        for (Operand& output : unwritten.outputs) output.address = 0;
        sweep(unwritten, 1, wanted, false);
        const std::vector<char> negative = negative_rows();
        for_ranges(table, threads, [&](const Range& range, std::size_t r, int) {
            Tally ignored;
            loop(&range, 1, plan, r, negative[r] ? -1 : 1, ignored);
        });
    }

    Stats stats;
    if (!wanted) return stats;
    stats.kept.assign(rows * models, 0);
    for (auto* of : {&stats.positive, &stats.negative, &stats.cancelled, &stats.conflicts}) of->assign(rows, 0);
    for (const Counts& c : counts) {
        for (std::size_t i = 0; i < c.kept.size(); ++i) stats.kept[i] += c.kept[i];
        for (std::size_t r = 0; r < rows; ++r) {
            stats.positive[r] += c.rows[r].positive;
            stats.negative[r] += c.rows[r].negative;
            stats.cancelled[r] += c.rows[r].cancelled;
            stats.conflicts[r] += c.rows[r].conflicts;
        }
    }
    return stats;
}

}  // namespace isthmus::cpu
