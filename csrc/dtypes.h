// The storage types and how their values widen to, and round from, the types that rules compute in.
//
// Rounding is to nearest, ties to even. A float64 value narrows to 16 bits through a float32 that is rounded to odd,
// which gives the same result as rounding once.
#pragma once

#include <cstdint>
#include <cstring>

#include "rules.h"

namespace isthmus {

enum class Dtype : std::uint8_t { f64, f32, bf16, f16 };

struct bf16 {
    std::uint16_t bits;
};
struct f16 {
    std::uint16_t bits;
};

ISTHMUS_RULE int size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

template <class To, class From>
ISTHMUS_RULE To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

// The bits of infinity, beyond which a magnitude is NaN: of float64, float32 or bfloat16 as an integer of that size.
template <class Key>
constexpr Key infinite = sizeof(Key) == 8   ? Key(0x7ff0000000000000)
                         : sizeof(Key) == 4 ? Key(0x7f800000)
                                            : Key(0x7f80);

// Either value, by masks: a conditional expression would often become a branch, and the loop around it not a vector
// loop.
ISTHMUS_RULE std::uint32_t select(bool condition, std::uint32_t yes, std::uint32_t no) {
    const std::uint32_t mask = -std::uint32_t{condition};
    return (yes & mask) | (no & ~mask);
}

ISTHMUS_RULE float to_float(bf16 x) { return bit_cast<float>(std::uint32_t{x.bits} << 16); }

ISTHMUS_RULE float to_float(f16 x) {
    const std::uint32_t sign = std::uint32_t(x.bits & 0x8000) << 16;
    const std::uint32_t magnitude = std::uint32_t(x.bits & 0x7fff) << 13;
    // The product is exact, subnormals included: it moves the exponent's bias from 15 to 127.
    const std::uint32_t finite = bit_cast<std::uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
    const bool special = magnitude >= 0x0f800000;  // infinity or NaN
    return bit_cast<float>(sign | select(special, magnitude | 0x7f800000, finite));
}

ISTHMUS_RULE bf16 to_bf16(float x) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(x);
    const bool nan = x != x;
    const std::uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return {std::uint16_t(select(nan, bits | 0x400000, rounded) >> 16)};
}

ISTHMUS_RULE f16 to_f16(float x) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    const std::uint32_t special = 0x7c00 | std::uint32_t{magnitude > 0x7f800000} << 9;  // infinity, or a quiet NaN
    // Below the smallest normal f16, adding one half puts the f16 subnormal's unit at the sum's last place.
    const std::uint32_t subnormal = bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    const std::uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const std::uint32_t finite = select(magnitude < 0x38800000, subnormal, normal);
    return {std::uint16_t(sign | select(magnitude >= 0x47800000, special, finite))};
}

// float64 -> float32 rounded to odd: towards zero, with the last bit set where that was inexact.
ISTHMUS_RULE float to_float_odd(double x) {
    const float nearest = static_cast<float>(x);
    const double back = nearest;
    const bool away = ((back > x) & (x > 0)) | ((back < x) & (x < 0));
    const std::uint32_t inexact = back != x;
    return bit_cast<float>((bit_cast<std::uint32_t>(nearest) - std::uint32_t(away)) | inexact);
}

template <class C>
ISTHMUS_RULE C widen(double x) {
    return static_cast<C>(x);
}
template <class C>
ISTHMUS_RULE C widen(float x) {
    return static_cast<C>(x);
}
template <class C>
ISTHMUS_RULE C widen(bf16 x) {
    return static_cast<C>(to_float(x));
}
template <class C>
ISTHMUS_RULE C widen(f16 x) {
    return static_cast<C>(to_float(x));
}

ISTHMUS_RULE void narrow(double& out, double x) { out = x; }
ISTHMUS_RULE void narrow(float& out, double x) { out = static_cast<float>(x); }
ISTHMUS_RULE void narrow(bf16& out, double x) { out = to_bf16(to_float_odd(x)); }
ISTHMUS_RULE void narrow(f16& out, double x) { out = to_f16(to_float_odd(x)); }
ISTHMUS_RULE void narrow(double& out, float x) { out = x; }
ISTHMUS_RULE void narrow(float& out, float x) { out = x; }
ISTHMUS_RULE void narrow(bf16& out, float x) { out = to_bf16(x); }
ISTHMUS_RULE void narrow(f16& out, float x) { out = to_f16(x); }

}  // namespace isthmus
