// Where the problems of a stack and their memory lie.
#pragma once

#include "../assignment.h"
#include "plans.h"

namespace isthmus::cuda {

template <class T>
ISTHMUS_BODY Assigning<T> problem_of(const Stack& stack, void* workspace, std::int64_t p) {
    const std::int64_t cols = stack.problems * stack.cols, first = p * stack.cols;
    double* open = reinterpret_cast<double*>(static_cast<std::int64_t*>(workspace) + stack.problems);
    std::int32_t* owner = reinterpret_cast<std::int32_t*>(open + cols);
    return {static_cast<const T*>(stack.matrices) + p * stack.rows * stack.cols,
            stack.rows,
            stack.cols,
            stack.maximize,
            stack.starts != nullptr ? stack.starts + first : nullptr,
            stack.columns + p * stack.rows,
            stack.u != nullptr ? stack.u + p * stack.rows : nullptr,
            stack.v + first,
            stack.primal + p,
            stack.dual + p,
            stack.faults + 3 * p,
            open + first,
            owner + first,
            owner + cols + first,
            owner + 2 * cols + first};
}

// The first entry of a problem that is not valid, as its rows find it.
ISTHMUS_BODY std::int64_t* invalid_of(void* workspace, std::int64_t p) {
    return static_cast<std::int64_t*>(workspace) + p;
}

}  // namespace isthmus::cuda
