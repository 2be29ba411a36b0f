// Chooses between the instruction sets at run time.

#include <algorithm>
#include <atomic>
#include <iterator>

#include "loops.h"

namespace isthmus::cpu {

namespace {

struct Set {
    const Loops& loops;
    bool (*supported)();
};

const Set all[] = {
    {base_loops, [] { return true; }},
#ifdef ISTHMUS_X86_SETS
    {v3_loops, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }},
    {v4_loops,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("f16c");
     }},
#endif
};

const Loops* widest() {
    return &std::find_if(std::rbegin(all), std::rend(all), [](const Set& set) { return set.supported(); })->loops;
}

std::atomic<const Loops*>& chosen() {
    static std::atomic<const Loops*> loops = widest();
    return loops;
}

}  // namespace

const Loops& loops() { return *chosen().load(std::memory_order_relaxed); }

std::vector<InstructionSet> instruction_sets() {
    std::vector<InstructionSet> sets;
    for (const Set& set : all) sets.push_back({set.loops.name, set.supported()});
    return sets;
}

std::string instruction_set() { return loops().name; }

void use_instruction_set(const std::string& name) {
    chosen() =
        &std::find_if(std::begin(all), std::end(all), [&](const Set& set) { return name == set.loops.name; })->loops;
}

}  // namespace isthmus::cpu
