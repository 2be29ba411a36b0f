// Rows of tensors in the memory of a device, and how a team works through a block of one.
//
// Bodies that the host can run, too. Includes the arithmetic of a consensus and the random bits for this namespace.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "../dtypes.h"
#include "../team.h"
#include "plans.h"

namespace isthmus::cuda {

#include "../consensus.h"

#include "../philox.h"

// Whether all inputs of a row, and its output, begin at whole accesses of 16 bytes.
ISTHMUS_BODY bool is_aligned(const std::int64_t* addresses, int operands) {
    std::int64_t bits = 0;
    for (int k = 0; k < operands; ++k) bits |= addresses[k];
    return bits % 16 == 0;
}

// The elements of one block.
struct Block {
    std::int64_t row, begin;
    std::int32_t n;
    const std::int64_t* addresses;
    bool aligned;

    ISTHMUS_BODY Block(const Rows& rows, std::int64_t b)
        : row(rows.row_of_block[b]),
          begin((b - rows.first_block[row]) * rows.block),
          n(static_cast<std::int32_t>(rows.numel[row] - begin < rows.block ? rows.numel[row] - begin : rows.block)),
          addresses(rows.addresses + row * (rows.width + 1)),
          aligned(is_aligned(addresses, rows.width + 1)) {}
};

// What one thread reads of an input at a time.
template <class S>
constexpr int per_access = 16 / sizeof(S);

template <class S>
using Computed = std::conditional_t<sizeof(S) == 8, double, float>;

struct alignas(16) Bytes16 {
    std::uint32_t words[4];
};
struct alignas(8) Bytes8 {
    std::uint32_t words[2];
};

template <class S>
struct Vector {
    S x[per_access<S>];
};

// `count` values from element i, as one access where that is aligned; the rest is zero.
template <class S>
ISTHMUS_BODY Vector<S> load(std::int64_t address, std::int64_t i, std::int32_t count, bool aligned) {
    const S* x = reinterpret_cast<const S*>(address) + i;
    ISTHMUS_GLOBAL(x);
    if (aligned && count >= per_access<S>) return bit_cast<Vector<S>>(*reinterpret_cast<const Bytes16*>(x));
    Vector<S> result{};
    ISTHMUS_UNROLL
    for (int e = 0; e < per_access<S>; ++e)
        if (e < count) result.x[e] = x[e];
    return result;
}

template <class T, int N>
ISTHMUS_BODY void store_aligned(T* out, const T* values) {
    constexpr int bytes = N * sizeof(T);
    if constexpr (bytes >= 16) {
        struct Part {
            T x[16 / sizeof(T)];
        };
        ISTHMUS_UNROLL
        for (int part = 0; part < bytes / 16; ++part) {
            Part values_of;
            ISTHMUS_UNROLL
            for (int e = 0; e < int(16 / sizeof(T)); ++e) values_of.x[e] = values[part * (16 / sizeof(T)) + e];
            reinterpret_cast<Bytes16*>(out)[part] = bit_cast<Bytes16>(values_of);
        }
    } else {
        struct Part {
            T x[N];
        } values_of;
        ISTHMUS_UNROLL
        for (int e = 0; e < N; ++e) values_of.x[e] = values[e];
        using Access = std::conditional_t<bytes == 8, Bytes8, std::uint32_t>;
        *reinterpret_cast<Access*>(out) = bit_cast<Access>(values_of);
    }
}

template <class T, class C, int N>
ISTHMUS_BODY void store_as(std::int64_t address, std::int64_t i, const C* values, std::int32_t count, bool aligned) {
    T* out = reinterpret_cast<T*>(address) + i;
    ISTHMUS_GLOBAL(out);
    T narrowed[N];
    ISTHMUS_UNROLL
    for (int e = 0; e < N; ++e) narrow(narrowed[e], values[e]);
    if (aligned && count >= N) return store_aligned<T, N>(out, narrowed);
    ISTHMUS_UNROLL
    for (int e = 0; e < N; ++e)
        if (e < count) out[e] = narrowed[e];
}

// Round `count` results to the output's dtype and write them from its element i.
template <class S, class C, int N>
ISTHMUS_BODY void store(Dtype dtype, std::int64_t address, std::int64_t i, const C (&values)[N], std::int32_t count,
                        bool aligned) {
    switch (dtype) {
        case Dtype::f64: return store_as<double, C, N>(address, i, values, count, aligned);
        case Dtype::f32: return store_as<float, C, N>(address, i, values, count, aligned);
        case Dtype::bf16: return store_as<bf16, C, N>(address, i, values, count, aligned);
        case Dtype::f16: return store_as<f16, C, N>(address, i, values, count, aligned);
    }
}

}  // namespace isthmus::cuda
