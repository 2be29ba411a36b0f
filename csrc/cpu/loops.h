// What one instruction set provides: its loops over a range of one row of a table.
#pragma once

#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "api.h"

namespace isthmus::cpu {

constexpr std::int64_t chunk = 512;  // elements worked on at a time; a multiple of a cache line for every dtype

struct Range {
    const Operand* inputs;
    std::size_t width;  // number of inputs
    Operand output;
    std::int64_t begin, end;  // elements
    bool stream;              // write the output past the caches
};

// Elements that must be written again if cancelled votes turn out negative.
struct Revision {
    std::size_t row;
    std::int64_t begin, end;
};

// What a consensus counts in a row.
struct Tally {
    std::int64_t positive = 0, negative = 0, cancelled = 0, conflicts = 0;
    std::int64_t* kept = nullptr;                // [model], where asked for
    std::vector<Revision>* to_revise = nullptr;  // where asked for
};

// A bracket around a magnitude that is looked for, as the bits of |t|, and what was found in it. Magnitudes strictly
// inside are kept; those equal to an end are only counted, because there may be very many of them.
template <class Key>
struct Bracket {
    Key low = 0, high = 0;
    std::int64_t above = 0, at_high = 0, at_low = 0;
    Key* found = nullptr;                  // room for one more than the capacity
    std::int64_t count = 0, capacity = 0;  // a count beyond the capacity was not kept
};

// The loops of selection, for magnitudes as the bits of |t|: 16 of them where all inputs are bf16 and there is no base,
// 32 where none is float64.
template <class Key>
struct SelectionLoops {
    // The magnitudes of runs of at most `chunk` elements, one after the other: keys[model][element].
    void (*sample)(const Range&, bool based, const std::int64_t* starts, std::int64_t count, std::int64_t run,
                   Key* const* keys);
    // Sort a range of at most a `segment` into brackets, those of model k from brackets[first[k]], and raise top[k] to
    // the largest magnitude.
    void (*sweep)(const Range&, bool based, Bracket<Key>* brackets, const std::size_t* first, Key* top);
};
constexpr std::int64_t segment = 1 << 16;  // elements: few enough to be counted in the 16 bits of one lane of several

// A float64 sum of a block is the sum of this many interleaved sums.
constexpr std::int64_t lanes = 16;
constexpr std::int64_t block = 4096;  // elements; a multiple of a chunk

template <class Offset>
using GatherLoop = void (*)(const char* source, const Offset* offsets, std::int64_t count, std::int64_t unit,
                            char* out);

struct Loops {
    const char* name;
    void (*lerp)(const Range&, double weight);
    void (*weighted_sum)(const Range&, const double* weights);
    // Over ranges of one row. `zero` is the sign of cancelled votes, or 0 for none; an output at address 0 is not
    // written.
    void (*consensus)(const Range* ranges, std::size_t count, const Plan&, std::size_t row, int zero, Tally&);
    // The sums of |t| before and after trimming, for each block of a range that begins with one: sums[block][model][2].
    void (*l1)(const Range&, const Plan&, std::size_t row, double* sums);
    // The dot products, likewise: sums[block][model][model], lower triangle.
    void (*gram)(const Range&, bool based, double* sums);
    // Units of `unit` bytes at source + offsets[0], source + offsets[1], ..., one after the other.
    std::tuple<GatherLoop<std::int32_t>, GatherLoop<std::int64_t>> gather;
    void (*stream)(char* out, const char* scratch, std::int64_t bytes);  // past the caches; both aligned to a line
    std::tuple<SelectionLoops<std::int16_t>, SelectionLoops<std::int32_t>, SelectionLoops<std::int64_t>> selection;
    // Solve the problems whose numbers `next` gives, until it gives one past the last.
    void (*assign)(const std::vector<Problem>&, const std::function<std::size_t()>& next, std::vector<Assignment>&);
};

// Other compilers than GCC do not apply a target pragma to templates, and other architectures need none of this.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ISTHMUS_X86_SETS
extern const Loops v3_loops, v4_loops;
#endif
extern const Loops base_loops;

const Loops& loops();  // of the instruction set in use

}  // namespace isthmus::cpu
