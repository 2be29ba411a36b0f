// All loops of one instruction set, in the order in which they use each other.

#include "loops.inl"

#include "tasks.inl"

#include "consensus.inl"

#include "permute.inl"
#include "reduce.inl"
#include "select.inl"

#include "minima.inl"

#include "assign_rows.inl"

#include "assign.inl"

inline Loops provided(const char* name) {
    return {name,
            lerp,
            weighted_sum,
            consensus,
            l1,
            gram,
            {gather<std::int32_t>, gather<std::int64_t>},
            stream_bytes,
            {selection<std::int16_t>(), selection<std::int32_t>(), selection<std::int64_t>()},
            assign};
}
