// Compiles the loops once per instruction set and chooses between them at run time.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "../philox.h"
#include "loops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace isthmus::cpu {

namespace base {
#if defined(__x86_64__)
#define ISTHMUS_STREAM 16
#endif
#include "loops.inl"

#include "tasks.inl"

#include "consensus.inl"

#include "reduce.inl"
#include "select.inl"
#undef ISTHMUS_STREAM
}  // namespace base

// Other compilers do not apply a target pragma to templates, and other architectures need none of this.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ISTHMUS_X86_SETS

#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi2")
namespace v3 {
#define ISTHMUS_STREAM 32
#define ISTHMUS_F16C
#include "loops.inl"

#include "tasks.inl"

#include "consensus.inl"

#include "reduce.inl"
#include "select.inl"
#undef ISTHMUS_STREAM
}  // namespace v3
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,bmi2,prefer-vector-width=512")
namespace v4 {
#define ISTHMUS_STREAM 64
#include "loops.inl"

#include "tasks.inl"

#include "consensus.inl"

#include "reduce.inl"
#include "select.inl"
#undef ISTHMUS_STREAM
#undef ISTHMUS_F16C
}  // namespace v4
#pragma GCC pop_options
#endif

namespace {

#define ISTHMUS_LOOPS(set)                                                                                        \
    set::lerp, set::weighted_sum, set::consensus, set::l1, set::gram, set::sample32, set::sample64, set::sweep32, \
        set::sweep64

const Loops all[] = {
    {"base", [] { return true; }, ISTHMUS_LOOPS(base)},
#ifdef ISTHMUS_X86_SETS
    {"v3", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }, ISTHMUS_LOOPS(v3)},
    {"v4",
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("f16c");
     },
     ISTHMUS_LOOPS(v4)},
#endif
};

const Loops* widest() {
    return &*std::find_if(std::rbegin(all), std::rend(all), [](const Loops& set) { return set.supported(); });
}

std::atomic<const Loops*>& chosen() {
    static std::atomic<const Loops*> set = widest();
    return set;
}

}  // namespace

const Loops& loops() { return *chosen().load(std::memory_order_relaxed); }

std::vector<InstructionSet> instruction_sets() {
    std::vector<InstructionSet> sets;
    for (const Loops& set : all) sets.push_back({set.name, set.supported()});
    return sets;
}

std::string instruction_set() { return loops().name; }

void use_instruction_set(const std::string& name) {
    chosen() = std::find_if(std::begin(all), std::end(all), [&](const Loops& set) { return name == set.name; });
}

}  // namespace isthmus::cpu
