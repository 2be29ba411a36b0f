// The CPU core: element-wise rules over a table of tensors, threads, and the choice of instruction set.
//
// Nothing here checks its arguments: addresses, lengths and dtypes are validated by the caller.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../dtypes.h"

namespace isthmus::cpu {

struct Operand {
    std::uintptr_t address;
    Dtype dtype;
};

// The tensors of one call. Row r combines `width` contiguous tensors of numel[r] elements, at inputs[r * width], into
// outputs[r], which is disjoint from all inputs or is exactly one of its own row.
struct Table {
    std::size_t width = 0;
    std::vector<std::int64_t> numel;
    std::vector<Operand> inputs, outputs;

    std::size_t rows() const { return numel.size(); }
    const Operand* row(std::size_t r) const { return inputs.data() + r * width; }
};

// Whether every output is as the table demands.
bool outputs_are_disjoint(const Table& table);

// out = lerp(x[0], x[1], w) for every row; a copy of x[0] at w = 0 and of x[1] at w = 1. One weight, or one for each
// row.
void lerp(const Table& table, const std::vector<double>& weights, int threads);

// out = w[0] x[0] + w[1] x[1] + ..., a left fold in the order of the inputs, for every row. One weight for each input,
// or for each input of each row.
void weighted_sum(const Table& table, const std::vector<double>& weights, int threads);

// Task vectors: what the models of a row differ by from its base, which is the row's first input where there is one;
// without a base the inputs are task vectors themselves. Arrays are [row][model] unless they say otherwise.

// Top sets, one for each group of elements and each model: the entries with |t| > value, and of those with |t| == value
// the ones whose index in the group is below `index`.
struct Cuts {
    const double* value = nullptr;
    const std::int64_t* index = nullptr;
};

struct Random {
    const std::int64_t* keys = nullptr;  // [row][model][4] 32-bit words: the key and the upper half of the counter
    const double* density = nullptr;
    const double* epsilon = nullptr;       // where the density depends on the magnitude's rank in its group
    const std::int64_t* starts = nullptr;  // [row], index of the row's first element in the whole tensor
    bool inverse = false;                  // divide survivors by their probability
};

// out = base + scaling * merge(trimmed task vectors), with every option decided.
struct Plan {
    bool based = false;
    const double* weights = nullptr;
    const double* divisors = nullptr;  // what a model adds to the divisor of a mean where it takes part
    const double* scaling = nullptr;   // [row]
    const double* rescale = nullptr;   // of survivors; or none
    Vote vote = Vote::none;
    ZeroSign zero_sign = ZeroSign::positive;
    bool tally_rows = false;  // the majority of signs is counted for each row; else over all of them
    MergeFunc merge = MergeFunc::sum;
    Cuts keep, drop;                            // [group][model]; survivors are in `keep` and not in `drop`
    const std::int64_t* lengths = nullptr;      // [row] of its groups; without it each row is one group
    const std::int64_t* first_group = nullptr;  // [row]
    Random random;
};

struct Stats {
    std::vector<std::int64_t> kept;  // survivors that are not zero
    // [row]: votes elected to either sign, votes that cancelled, entries with survivors of both signs
    std::vector<std::int64_t> positive, negative, cancelled, conflicts;
};

Stats consensus(const Table& table, const Plan& plan, bool stats, int threads);

// The sums of |t| before and after trimming: [row][model][2].
std::vector<double> l1(const Table& table, const Plan& plan, int threads);

// The dot products of the task vectors of each group: [group][model][model].
std::vector<double> gram(const Table& table, bool based, const std::int64_t* lengths, int threads);

// The ranks-th largest magnitudes of each group and model: [group][model][rank].
struct Selection {
    std::vector<double> value;
    std::vector<std::int64_t> index, above, equal;
    std::int64_t bad_row = -1, bad_model = -1;  // the first that is not finite; then the rest is undefined
};
struct Ranks {
    const std::int64_t* of;  // [group][model][rank]: k for the k-th largest; 0 selects nothing, n or more everything
    std::size_t count;       // of ranks
    bool exact;              // of entries equal to the k-th largest, the first ones that fill k; else all
};
// Groups are all rows together, or each row, or its parts of `lengths`.
Selection select(const Table& table, bool based, bool whole, const std::int64_t* lengths, const Ranks& ranks,
                 int threads);

// What permute reads one tensor of: the axes of the result as they lie in memory, from outer to inner with no gaps.
struct Source {
    std::uintptr_t address;
    std::int64_t element_size;                 // bytes
    std::vector<std::int64_t> shape, strides;  // of the axes; strides within the source, in elements
    std::vector<const std::int64_t*> indices;  // of each axis, as many entries as it is long; none where it stays
};
struct Index {
    const std::int64_t* values;
    std::int64_t size;
};

// The first index with an entry that is not within 0 .. size - 1.
std::optional<std::size_t> first_out_of_range(const std::vector<Index>& indices);

// Bytes that an output covers.
struct Span {
    std::uintptr_t begin, end;
};

// Whether outputs share no memory with each other, nor with sources in C-order and their indices.
bool outputs_are_disjoint(std::vector<Span> outputs, const std::vector<Source>& sources);

// out[i0, i1, ...] = x[idx0[i0], idx1[i1], ...] for every tensor; outputs are disjoint from all sources.
void permute(const std::vector<Source>& sources, const std::vector<std::uintptr_t>& outputs, int threads);

// lerp of the first input of each row and what is read through sources[r], of dtypes[r]; outputs are disjoint from all
// sources.
void lerp_permuted(const Table& table, const std::vector<Source>& sources, const std::vector<Dtype>& dtypes,
                   const std::vector<double>& weights, int threads);

// Linear assignment: pair every row of a matrix with a column of its own, at the least cost, or the highest value.
struct Problem {
    Operand matrix;           // f32 or f64, row after row
    std::int64_t rows, cols;  // no more rows than columns, at least one
    bool maximize;            // costs are the values negated
    const double* start;      // a dual for each column to begin with, of a square problem; or none
    std::int64_t* columns;    // result: of each row
    double *u, *v;  // result: duals of rows and columns, u[i] + v[j] no more than the cost of i with j; or none
};
enum class Fault : std::uint8_t { none, nan, unbounded, infeasible };  // a cost is minus infinity; no pairing is finite
struct Assignment {
    double primal = 0, dual = 0;  // the cost, and what no pairing costs less than: the sum of the duals, if wanted
    Fault fault = Fault::none;
    std::int64_t row = -1, column = -1;  // where
};

std::vector<Assignment> assign(const std::vector<Problem>& problems, int threads);

// Instruction sets compiled in, from the plainest to the widest: "base", then "v3" (AVX2) and "v4" (AVX-512) on x86-64.
struct InstructionSet {
    std::string name;
    bool supported;  // by this processor
};
std::vector<InstructionSet> instruction_sets();
std::string instruction_set();                      // the one in use; the widest supported until chosen otherwise
void use_instruction_set(const std::string& name);  // must be compiled in and supported

bool has_openmp();

}  // namespace isthmus::cpu
