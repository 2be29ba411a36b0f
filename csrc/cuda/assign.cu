// Linear assignment.

#include <launch.cuh>

#include "assign.h"

namespace isthmus::cuda {

namespace {

template <class T>
__global__ void __launch_bounds__(block_threads) assign_kernel(Stack stack, void* workspace) {
    for (std::int64_t p = blockIdx.x; p < stack.problems; p += gridDim.x)
        assign_all(BlockTeam{}, problem_of<T>(stack, workspace, p));
}

template <class T>
__global__ void __launch_bounds__(block_threads) rows_kernel(Stack stack, void* workspace) {
    for (std::int64_t item = blockIdx.x; item < stack.problems * stack.rows; item += gridDim.x) {
        const std::int64_t p = item / stack.rows;
        match_row(BlockTeam{}, problem_of<T>(stack, workspace, p), item % stack.rows, invalid_of(workspace, p));
    }
}

template <class T>
__global__ void __launch_bounds__(block_threads) match_kernel(Stack stack, void* workspace, std::int32_t* solved) {
    for (std::int64_t p = blockIdx.x; p < stack.problems; p += gridDim.x) {
        const std::int32_t distinct =
            match_all(BlockTeam{}, problem_of<T>(stack, workspace, p), *invalid_of(workspace, p));
        if (threadIdx.x == 0) solved[p] = distinct;
    }
}

}  // namespace

void assign(const Stack& stack, void* workspace, const Queue& queue) {
    const auto kernel = stack.dtype == Dtype::f64 ? assign_kernel<double> : assign_kernel<float>;
    launch("isthmus assign kernel", kernel, stack.problems, queue, stack, workspace);
}

void assign_nearest(const Stack& stack, std::int32_t* solved, void* workspace, const Queue& queue) {
    const bool is_double = stack.dtype == Dtype::f64;
    // Every byte 0x7f: beyond any entry.
    fill(workspace, 0x7f, stack.problems * problem_bytes, queue);
    launch("isthmus assign: rows", is_double ? rows_kernel<double> : rows_kernel<float>, stack.problems * stack.rows,
           queue, stack, workspace);
    launch("isthmus assign: match", is_double ? match_kernel<double> : match_kernel<float>, stack.problems, queue,
           stack, workspace, solved);
}

}  // namespace isthmus::cuda
