// Interpolation and weighted sums over a table.

#include <algorithm>

#include "work.h"

namespace isthmus::cpu {

void lerp(const Table& table, const std::vector<double>& weights, int threads) {
    const auto loop = loops().lerp;
    const bool per_row = weights.size() > 1;
    for_ranges(table, threads, [&](const Range& range, std::size_t r, int) { loop(range, weights[per_row ? r : 0]); });
}

void weighted_sum(const Table& table, const std::vector<double>& weights, int threads) {
    const auto loop = loops().weighted_sum;
    const bool per_row = weights.size() > table.width;
    for_ranges(table, threads, [&](const Range& range, std::size_t r, int) {
        loop(range, weights.data() + (per_row ? r * table.width : 0));
    });
}

bool outputs_are_disjoint(const Table& table) {
    struct Span {
        std::uintptr_t begin, end;
        std::size_t row;
        bool is_output;
    };
    std::vector<Span> spans;
    spans.reserve(table.rows() * (table.width + 1));
    const auto add = [&](const Operand& operand, std::size_t row, bool is_output) {
        const std::uintptr_t bytes = table.numel[row] * size_of(operand.dtype);
        if (bytes > 0) spans.push_back({operand.address, operand.address + bytes, row, is_output});
    };
    for (std::size_t r = 0; r < table.rows(); ++r) {
        for (const Operand* x = table.row(r); x != table.row(r + 1); ++x) add(*x, r, false);
        add(table.outputs[r], r, true);
    }
    std::sort(spans.begin(), spans.end(), [](const Span& x, const Span& y) { return x.begin < y.begin; });
    std::uintptr_t furthest = 0, furthest_output = 0;  // the ends, so far, of all spans and of the outputs'
    for (std::size_t i = 0; i < spans.size();) {
        // Spans that begin together may meet if they are one row's and equally long; any other meeting is an overlap.
        std::size_t next = i, outputs = 0;
        bool alike = true;
        std::uintptr_t end = 0;
        for (; next < spans.size() && spans[next].begin == spans[i].begin; ++next) {
            outputs += spans[next].is_output;
            alike &= spans[next].row == spans[i].row && spans[next].end == spans[i].end;
            end = std::max(end, spans[next].end);
        }
        if (outputs > 0 && (furthest > spans[i].begin || outputs > 1 || !alike)) return false;
        if (furthest_output > spans[i].begin) return false;
        furthest = std::max(furthest, end);
        if (outputs > 0) furthest_output = std::max(furthest_output, end);
        i = next;
    }
    return true;
}

}  // namespace isthmus::cpu
