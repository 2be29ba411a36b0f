// What kernels for CUDA devices are told. Arrays are in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../dtypes.h"

namespace isthmus::cuda {

// A table as isthmus.kernels.table makes it. Row r has `width` inputs of one dtype and an output, and numel[r] > 0
// elements, worked on in blocks of `block`, a multiple of 16.
struct Rows {
    const std::int64_t* addresses;  // [row][width + 1]
    const std::int64_t* numel;
    const std::int64_t* first_block;
    const std::int32_t* row_of_block;
    std::int64_t rows, blocks, block;
    std::int32_t width;
    Dtype dtype, out_dtype;
};

// Top sets, [group][model]: |t| > value, and of those with |t| == value the ones whose index in the group is below.
struct Cuts {
    const double* value;  // or none
    const std::int64_t* index;
};

struct Random {
    const std::int64_t* keys;    // [row][model][4] 32-bit words: the key and the upper half of the counter; or none
    const double* density;       // [row][model]
    const std::int64_t* starts;  // [row], index of the row's first element in the whole tensor
    bool inverse;                // divide survivors by their probability
};

// What is merged how. Arrays are [row][model] unless they say otherwise.
struct Plan {
    bool based;
    Vote vote;
    MergeFunc merge;
    const double* weights;
    const double* divisors;       // what a model adds to the divisor of a mean where it takes part; or none, for one
    const double* scaling;        // [row]
    const double* rescale;        // of survivors; or none
    Cuts keep, drop;              // survivors are in `keep`, where there is one, and not in `drop`
    const std::int64_t* lengths;  // [row] of its groups; without it each row is one group
    const std::int64_t* first_group;  // [row], where there are cuts
    Random random;
};

// One sweep over a table. With a majority of signs there are two, without the host between them: the first counts, and
// either writes as if cancelled votes were positive, and marks them, or writes nothing; the second writes the marked
// entries of rows where they are negative, or everything.
struct Sweep {
    int zero;                     // the sign of cancelled votes, or 0 for none
    bool write;                   // outputs
    bool by_row;                  // a tally for each row; else one
    std::int64_t* count;          // adds votes for + less those for -; or none
    const std::int64_t* decide;   // the sign of cancelled votes is that of this tally, of nothing negative; or none
    std::uint32_t* mark;          // sets a bit for each access with cancelled votes; or none
    const std::uint32_t* marked;  // write these alone, where the tally decides for negative; or none
    std::int64_t* kept;           // [row][model], survivors that are not zero; or none
    std::int64_t* counts;         // [row][4]: votes for either sign, cancelled ones, entries with both signs; or none
};

// The 32-bit words of marks of one block, a bit for each access of 16 bytes, and of all.
ISTHMUS_RULE std::int64_t mark_words_of_block(const Rows& rows) {
    return (rows.block * size_of(rows.dtype) / 16 + 31) / 32;
}
ISTHMUS_RULE std::int64_t mark_words(const Rows& rows) { return rows.blocks * mark_words_of_block(rows); }

// A group of more than `most_small` elements: all rows, or one. Its blocks follow each other.
struct Large {
    std::int64_t group, first_block, blocks, elements;
    std::int64_t before;  // blocks of the large groups before it
};
// Groups of fewer elements, and parts of rows, are each ranked by one block of threads.
constexpr std::int64_t most_small = 1 << 16;

// Which ranks to select. Groups are all rows together, or each row, or its parts of `lengths`.
struct Ranking {
    bool based, whole, exact;
    std::int64_t models, groups, ranks;  // ranks of each group and model
    const std::int64_t* lengths;         // [row], or none
    const std::int64_t* first_group;     // [row], ascending
    const std::int64_t* row_starts;      // [row], elements before a row
    const std::int64_t* k;  // [group][model][rank]; 0 selects nothing, the number of elements or more everything
    std::int64_t large_groups;
    const Large* large;  // in ascending order
    // The result: [group][model][rank].
    double* value;
    std::int64_t *index, *above, *equal;
    std::int64_t* nonfinite;  // lowered to the least row * models + model that is not finite
};

// Linear assignment problems of one shape.
struct Stack {
    std::int64_t problems, rows, cols;  // no more rows than columns, at least one
    const void* matrices;               // f32 or f64, [problem][row][column]
    Dtype dtype;
    bool maximize;
    const double* starts;  // [problem][column], duals to begin with; or none
    // The result.
    std::int64_t* columns;  // [problem][row]
    double* u;              // [problem][row], or none: then there are no sums either
    double* v;              // [problem][column]
    double *primal, *dual;  // [problem]
    std::int64_t* faults;   // [problem][3]: 0 for none, 1 for NaN, 2 unbounded, 3 infeasible; row; column
};

// Bytes of memory that a stack needs: for each column of a problem, and for each problem.
constexpr std::int64_t column_bytes = sizeof(double) + 3 * sizeof(std::int32_t), problem_bytes = sizeof(std::int64_t);
inline std::size_t assign_workspace(const Stack& stack) {
    return static_cast<std::size_t>(stack.problems * (problem_bytes + stack.cols * column_bytes));
}

}  // namespace isthmus::cuda
