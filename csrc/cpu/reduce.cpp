// Sums over rows and groups in a fixed order: blocks of 4096 elements, added from the first to the last.

#include <algorithm>

#include "work.h"

namespace isthmus::cpu {

namespace {

constexpr std::int64_t block = 4096;  // a multiple of a chunk

struct Block {
    std::size_t row, total;  // which sum it belongs to
    std::int64_t begin, end;
};

std::int64_t length_of(const Table& table, const std::int64_t* lengths, std::size_t row) {
    return lengths != nullptr ? lengths[row] : table.numel[row];
}

// Add body(block, sums) over all blocks, `width` sums each: [group][width].
template <class Body>
std::vector<double> add_blocks(const Table& table, const std::int64_t* lengths, std::size_t width, int threads,
                               Body body) {
    const DefaultFloatEnvironment environment;
    std::vector<Block> blocks;
    std::size_t groups = 0;
    std::int64_t bytes = 0;
    for (std::size_t r = 0; r < table.rows(); ++r) {
        const std::int64_t length = length_of(table, lengths, r);
        if (table.numel[r] == 0 && lengths == nullptr) ++groups;  // a sum of nothing
        for (std::int64_t start = 0; start < table.numel[r]; start += length, ++groups)
            for (std::int64_t begin = start; begin < start + length; begin += block)
                blocks.push_back({r, groups, begin, std::min(begin + block, start + length)});
        for (const Operand* x = table.row(r); x != table.row(r + 1); ++x) bytes += table.numel[r] * size_of(x->dtype);
    }
    const int parts = useful_threads(bytes, threads);
    std::vector<double> sums(blocks.size() * width), totals(groups * width);
    run_parallel(parts, [&](int k) {
        const std::size_t from = blocks.size() * k / parts, to = blocks.size() * (k + 1) / parts;
        for (std::size_t b = from; b < to; ++b) body(blocks[b], &sums[b * width]);
    });
    for (std::size_t b = 0; b < blocks.size(); ++b)
        for (std::size_t i = 0; i < width; ++i) totals[blocks[b].total * width + i] += sums[b * width + i];
    return totals;
}

Range range_of(const Table& table, const Block& b) {
    return {table.row(b.row), table.width, Operand{0, Dtype::f32}, b.begin, b.end, false};
}

}  // namespace

std::vector<double> gram(const Table& table, bool based, const std::int64_t* lengths, int threads) {
    const auto loop = loops().gram;
    const std::size_t models = table.width - based;
    std::vector<double> sums = add_blocks(table, lengths, models * models, threads,
                                          [&](const Block& b, double* out) { loop(range_of(table, b), based, out); });
    for (std::size_t g = 0; g < sums.size(); g += models * models)
        for (std::size_t j = 0; j < models; ++j)
            for (std::size_t k = j + 1; k < models; ++k) sums[g + j * models + k] = sums[g + k * models + j];
    return sums;
}

std::vector<double> l1(const Table& table, const Plan& given, int threads) {
    const auto loop = loops().l1;
    Plan plan = given;
    std::vector<std::int64_t> first_group = first_groups(table, plan.lengths);
    plan.first_group = first_group.data();
    return add_blocks(table, nullptr, 2 * (table.width - plan.based), threads,
                      [&](const Block& b, double* out) { loop(range_of(table, b), plan, b.row, out); });
}

}  // namespace isthmus::cpu
