// What one instruction set provides: its loops over a range of one row of a table.
#pragma once

#include "api.h"

namespace isthmus::cpu {

struct Range {
    const Operand* inputs;
    std::size_t width;  // number of inputs
    Operand output;
    std::int64_t begin, end;  // elements
    bool stream;              // write the output past the caches
};

struct Loops {
    const char* name;
    bool (*supported)();
    void (*lerp)(const Range&, double weight);
    void (*weighted_sum)(const Range&, const double* weights);
};

const Loops& loops();  // of the instruction set in use

}  // namespace isthmus::cpu
