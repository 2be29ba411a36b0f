// The CPU core: element-wise rules over a table of tensors, threads, and the choice of instruction set.
//
// Nothing here checks its arguments: addresses, lengths and dtypes are validated by the caller.
#pragma once

#include <cstdint>
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

// out = lerp(x[0], x[1], w) for every row; a copy of x[0] at w = 0 and of x[1] at w = 1. One weight, or one for each row.
void lerp(const Table& table, const std::vector<double>& weights, int threads);

// out = w[0] x[0] + w[1] x[1] + ..., a left fold in the order of the inputs, for every row. One weight for each input, or
// for each input of each row.
void weighted_sum(const Table& table, const std::vector<double>& weights, int threads);

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
