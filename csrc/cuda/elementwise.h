// Interpolation and weighted sums over one block of a row.
#pragma once

#include "rows.h"

namespace isthmus::cuda {

// out = lerp(x[0], x[1], w): a copy of an end where w is 0 or 1. One weight, or one for each row.
template <class S, class Team>
ISTHMUS_BODY void lerp_block(const Team& team, const Rows& rows, const double* weights, bool per_row, std::int64_t b) {
    using C = Computed<S>;
    constexpr int at_once = per_access<S>, accesses = 2;
    const Block block(rows, b);
    const double weight = weights[per_row ? block.row : 0];
    const bool near_a = weight < 0.5;
    const C w = static_cast<C>(near_a ? weight : 1 - weight);
    const auto result_of = [&](C x, C y) {
        if (weight == 0) return x;
        if (weight == 1) return y;
        return near_a ? rules::lerp_from_a(x, y, w) : rules::lerp_from_b(x, y, w);
    };
    const std::int32_t stride = team.size() * at_once;
    ISTHMUS_ROLLED
    for (std::int32_t i = team.rank() * at_once; i < block.n; i += stride * accesses) {
        Vector<S> x[accesses], y[accesses];
        ISTHMUS_UNROLL
        for (int j = 0; j < accesses; ++j) {
            const std::int32_t at = i + j * stride;
            if (at >= block.n) break;
            x[j] = load<S>(block.addresses[0], block.begin + at, block.n - at, block.aligned);
            y[j] = load<S>(block.addresses[1], block.begin + at, block.n - at, block.aligned);
        }
        ISTHMUS_UNROLL
        for (int j = 0; j < accesses; ++j) {
            const std::int32_t at = i + j * stride;
            if (at >= block.n) break;
            C result[at_once];
            ISTHMUS_UNROLL
            for (int e = 0; e < at_once; ++e) result[e] = result_of(widen<C>(x[j].x[e]), widen<C>(y[j].x[e]));
            store<S>(rows.out_dtype, block.addresses[2], block.begin + at, result, block.n - at, block.aligned);
        }
    }
}

// out = w[0] x[0] + w[1] x[1] + ..., a left fold. A weight for each input, or for each input of each row.
template <class S, class Team>
ISTHMUS_BODY void weighted_sum_block(const Team& team, const Rows& rows, const double* weights, bool per_row,
                                     std::int64_t b) {
    using C = Computed<S>;
    constexpr int at_once = per_access<S>, in_step = 4;  // inputs that are read before the first is waited for
    const Block block(rows, b);
    const double* w = weights + (per_row ? block.row * rows.width : 0);
    ISTHMUS_ROLLED
    for (std::int32_t i = team.rank() * at_once; i < block.n; i += team.size() * at_once) {
        C sum[at_once] = {};
        ISTHMUS_ROLLED
        for (int k = 0; k < rows.width; k += in_step) {
            Vector<S> x[in_step];
            ISTHMUS_UNROLL
            for (int j = 0; j < in_step; ++j) {
                if (k + j >= rows.width) break;
                x[j] = load<S>(block.addresses[k + j], block.begin + i, block.n - i, block.aligned);
            }
            ISTHMUS_UNROLL
            for (int j = 0; j < in_step; ++j) {
                if (k + j >= rows.width) break;
                const C weight = static_cast<C>(w[k + j]);
                ISTHMUS_UNROLL
                for (int e = 0; e < at_once; ++e) {
                    const C value = widen<C>(x[j].x[e]);
                    sum[e] = k + j == 0 ? rules::scaled(weight, value) : rules::add_scaled(sum[e], weight, value);
                }
            }
        }
        store<S>(rows.out_dtype, block.addresses[rows.width], block.begin + i, sum, block.n - i, block.aligned);
    }
}

}  // namespace isthmus::cuda
