// Element-wise rules over tables of tensors.

#include <launch.cuh>

#include "elementwise.h"
#include "merge.h"

namespace isthmus::cuda {

namespace {

template <class S>
__global__ void __launch_bounds__(block_threads) lerp_kernel(Rows rows, const double* weights, bool per_row) {
    for (std::int64_t b = blockIdx.x; b < rows.blocks; b += gridDim.x)
        lerp_block<S>(BlockTeam{}, rows, weights, per_row, b);
}

template <class S>
__global__ void __launch_bounds__(block_threads) weighted_sum_kernel(Rows rows, const double* weights, bool per_row) {
    for (std::int64_t b = blockIdx.x; b < rows.blocks; b += gridDim.x)
        weighted_sum_block<S>(BlockTeam{}, rows, weights, per_row, b);
}

template <class S, Vote V, int Models, bool AtRandom>
__global__ void __launch_bounds__(block_threads, Models <= 4 ? 2 : 1)
    consensus_kernel(Rows rows, Plan plan, Sweep sweep) {
    for (std::int64_t b = blockIdx.x; b < rows.blocks; b += gridDim.x)
        consensus_block<S, V, Models, AtRandom>(BlockTeam{}, rows, plan, sweep, b);
}

template <class S, bool AtRandom>
__global__ void __launch_bounds__(block_threads) any_consensus_kernel(Rows rows, Plan plan, Sweep sweep) {
    for (std::int64_t b = blockIdx.x; b < rows.blocks; b += gridDim.x)
        any_consensus_block<S, AtRandom>(BlockTeam{}, rows, plan, sweep, b);
}

// Call body with a value of the type that inputs are stored in.
template <class Body>
void with_stored(Dtype dtype, Body body) {
    switch (dtype) {
        case Dtype::f64: return body(double{});
        case Dtype::f32: return body(float{});
        case Dtype::bf16: return body(bf16{});
        case Dtype::f16: return body(f16{});
    }
}

using ConsensusKernel = void (*)(Rows, Plan, Sweep);

// The kernel that keeps an entry in registers, or none. Each is code for its vote, dtype and number of models, so there
// are as few as serve the cases that must be as fast as memory: float16 has those of up to four models and a plain
// vote.
template <class S, Vote V>
ConsensusKernel trimmed_kernel(int models) {
    if (models <= 4) return consensus_kernel<S, V, 4, false>;
    if constexpr (!std::is_same_v<S, f16> && (V == Vote::none || V == Vote::total)) {
        if (models <= 8) return consensus_kernel<S, V, 8, false>;
    }
    return nullptr;
}

template <class S>
ConsensusKernel usual_kernel(const Rows& rows, const Plan& plan, const Sweep& sweep) {
    const int models = rows.width - plan.based;
    if (plan.merge == MergeFunc::max || sweep.kept != nullptr || sweep.counts != nullptr) return nullptr;
    if (plan.random.keys != nullptr) {
        if (models > 4) return nullptr;
        if (plan.vote == Vote::none) return consensus_kernel<S, Vote::none, 4, true>;
        return plan.vote == Vote::total ? consensus_kernel<S, Vote::total, 4, true> : nullptr;
    }
    if (plan.vote == Vote::none) return trimmed_kernel<S, Vote::none>(models);
    if (plan.vote == Vote::total) return trimmed_kernel<S, Vote::total>(models);
    if constexpr (!std::is_same_v<S, f16>) {
        if (plan.vote == Vote::weighted_total) return trimmed_kernel<S, Vote::weighted_total>(models);
        return trimmed_kernel<S, Vote::frequency>(models);
    }
    return nullptr;
}

}  // namespace

void lerp(const Rows& rows, const double* weights, bool per_row, const Queue& queue) {
    with_stored(rows.dtype, [&](auto stored) {
        launch("isthmus lerp kernel", lerp_kernel<decltype(stored)>, rows.blocks, queue, rows, weights, per_row);
    });
}

void weighted_sum(const Rows& rows, const double* weights, bool per_row, const Queue& queue) {
    with_stored(rows.dtype, [&](auto stored) {
        launch("isthmus weighted_sum kernel", weighted_sum_kernel<decltype(stored)>, rows.blocks, queue, rows, weights,
               per_row);
    });
}

void consensus(const Rows& rows, const Plan& plan, const Sweep& sweep, const Queue& queue) {
    with_stored(rows.dtype, [&](auto stored) {
        using S = decltype(stored);
        ConsensusKernel kernel = nullptr;
        if constexpr (sizeof(S) < 8) kernel = usual_kernel<S>(rows, plan, sweep);
        if (kernel == nullptr)
            kernel = plan.random.keys != nullptr ? any_consensus_kernel<S, true> : any_consensus_kernel<S, false>;
        launch("isthmus consensus kernel", kernel, rows.blocks, queue, rows, plan, sweep);
    });
}

}  // namespace isthmus::cuda
