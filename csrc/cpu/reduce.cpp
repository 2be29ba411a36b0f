// Sums over rows and groups in a fixed order: blocks of 4096 elements, added from the first to the last.

#include <algorithm>

#include "work.h"

namespace isthmus::cpu {

namespace {

constexpr std::int64_t longest = 64;         // blocks that one thread sums up at a time
constexpr std::size_t wave_bytes = 1 << 22;  // of sums that wait to be added, whatever the size of a model

// Consecutive blocks of one group.
struct Run {
    std::size_t row, group;
    std::int64_t begin, end;

    std::int64_t blocks() const { return (end - begin + block - 1) / block; }
};

// The totals of body(run, sums) over all blocks, `width` sums for each block and each group.
template <class Body>
std::vector<double> add_blocks(const Table& table, const std::int64_t* lengths, std::size_t width, int threads,
                               Body body) {
    const DefaultFloatEnvironment environment;
    const std::int64_t longest =  // blocks that one thread sums up at a time
        std::clamp<std::int64_t>(wave_bytes / (width * sizeof(double) * std::max(threads, 1)), 1, 64);
    std::vector<Run> runs;
    std::size_t groups = 0;
    std::int64_t bytes = 0;
    for (std::size_t r = 0; r < table.rows(); ++r) {
        const std::int64_t length = lengths != nullptr ? lengths[r] : table.numel[r];
        if (table.numel[r] == 0 && lengths == nullptr) ++groups;  // a sum of nothing
        for (std::int64_t start = 0; start < table.numel[r]; start += length, ++groups)
            for (std::int64_t begin = start; begin < start + length; begin += longest * block)
                runs.push_back({r, groups, begin, std::min(begin + longest * block, start + length)});
        for (const Operand* x = table.row(r); x != table.row(r + 1); ++x) bytes += table.numel[r] * size_of(x->dtype);
    }
    const int parts = useful_threads(bytes, threads);
    std::vector<double> totals(groups * width), sums;
    std::vector<std::size_t> place;
    for (std::size_t first = 0, next; first < runs.size(); first = next) {
        std::size_t blocks = 0;
        place.clear();
        for (next = first; next < runs.size(); ++next) {
            if (next - first >= static_cast<std::size_t>(parts) && blocks * width * sizeof(double) >= wave_bytes) break;
            place.push_back(blocks * width);
            blocks += runs[next].blocks();
        }
        sums.resize(blocks * width);
        run_parallel(parts, [&](int k) {
            const std::size_t from = place.size() * k / parts, to = place.size() * (k + 1) / parts;
            for (std::size_t i = from; i < to; ++i) body(runs[first + i], &sums[place[i]]);
        });
        for (std::size_t i = 0; i < place.size(); ++i) {
            double* total = &totals[runs[first + i].group * width];
            for (std::int64_t b = 0; b < runs[first + i].blocks(); ++b)
                for (std::size_t w = 0; w < width; ++w) total[w] += sums[place[i] + b * width + w];
        }
    }
    return totals;
}

Range range_of(const Table& table, const Run& run) {
    return {table.row(run.row), table.width, Operand{0, Dtype::f32}, run.begin, run.end, false};
}

}  // namespace

std::vector<double> gram(const Table& table, bool based, const std::int64_t* lengths, int threads) {
    const auto loop = loops().gram;
    const std::size_t models = table.width - based;
    std::vector<double> sums = add_blocks(table, lengths, models * models, threads,
                                          [&](const Run& run, double* out) { loop(range_of(table, run), based, out); });
    for (std::size_t g = 0; g < sums.size(); g += models * models)
        for (std::size_t j = 0; j < models; ++j)
            for (std::size_t k = j + 1; k < models; ++k) sums[g + j * models + k] = sums[g + k * models + j];
    return sums;
}

std::vector<double> l1(const Table& table, const Plan& given, int threads) {
    const auto loop = loops().l1;
    Plan plan = given;
    const std::vector<std::int64_t> first_group = first_groups(table, plan.lengths);
    plan.first_group = first_group.data();
    return add_blocks(table, nullptr, 2 * (table.width - plan.based), threads,
                      [&](const Run& run, double* out) { loop(range_of(table, run), plan, run.row, out); });
}

}  // namespace isthmus::cpu
