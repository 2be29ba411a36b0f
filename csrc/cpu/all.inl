// All loops of one instruction set, in the order in which they use each other.

#include "loops.inl"

#include "tasks.inl"

#include "consensus.inl"

#include "reduce.inl"
#include "select.inl"

inline Loops provided(const char* name) {
    return {name, lerp, weighted_sum, consensus, l1, gram, sample32, sample64, sweep32, sweep64};
}
