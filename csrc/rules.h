// The scalar arithmetic of every element-wise rule, written once for the host and for devices.
//
// Each operation rounds once in the type C that the rule computes in (float or double), so results do not depend on the
// instruction set. Compile without contraction of multiply and add (-ffp-contract=off, -fmad=false).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ISTHMUS_RULE __host__ __device__ __forceinline__
#else
#define ISTHMUS_RULE inline
#endif

namespace isthmus {

// The options of a consensus.
enum class Vote : std::uint8_t { none, total, weighted_total, frequency };
enum class ZeroSign : std::uint8_t { majority, positive, negative, zero };
enum class MergeFunc : std::uint8_t { sum, mean, max };

}  // namespace isthmus

namespace isthmus::rules {

// Linear interpolation for a weight w below one half: exact at w = 0, a + w (b - a).
template <class C>
ISTHMUS_RULE C lerp_from_a(C a, C b, C w) {
    return a + w * (b - a);
}

// Linear interpolation for a weight of one half or more, with u = 1 - w: exact at w = 1, b - u (b - a).
template <class C>
ISTHMUS_RULE C lerp_from_b(C a, C b, C u) {
    return b - u * (b - a);
}

// One term of a weighted sum.
template <class C>
ISTHMUS_RULE C scaled(C w, C x) {
    return w * x;
}

// One step of the left fold of a weighted sum.
template <class C>
ISTHMUS_RULE C add_scaled(C sum, C w, C x) {
    return sum + w * x;
}

// A task vector's entry: what a model differs by from the base.
template <class C>
ISTHMUS_RULE C difference(C x, C base) {
    return x - base;
}

// A merged task vector added to the base, scaled. Adding nothing changes nothing: the base to the bit, -0 included.
template <class C>
ISTHMUS_RULE C applied(C base, C scaling, C merged) {
    return merged == 0 ? base : base + scaling * merged;
}

}  // namespace isthmus::rules
