// Kernels for CUDA devices: arguments in device memory, on a stream, with nothing checked but the launches.
//
// No function waits for the device or allocates on it. Arrays are in device memory unless they say otherwise, and live
// until the stream has done what was asked for. A launch that fails is a LaunchError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../dtypes.h"
#include "plans.h"

namespace isthmus::cuda {

struct LaunchError : std::runtime_error {
    using runtime_error::runtime_error;
};

// Where to run: a device by number and one of its streams, a cudaStream_t.
struct Queue {
    int device;
    std::uintptr_t stream;
};

// The architectures compiled for, "sm_80" and so on, and how many devices the driver offers; 0 without a driver.
std::vector<std::string> architectures();
int device_count();

// out = lerp(x[0], x[1], w) for every row: one weight, or one for each row.
void lerp(const Rows& rows, const double* weights, bool per_row, const Queue& queue);

// out = w[0] x[0] + w[1] x[1] + ...: a weight for each input, or for each input of each row.
void weighted_sum(const Rows& rows, const double* weights, bool per_row, const Queue& queue);

// One sweep of a consensus.
void consensus(const Rows& rows, const Plan& plan, const Sweep& sweep, const Queue& queue);

// The cuts of the k-th largest magnitudes of every group and model, as isthmus::cpu::select finds them. The large
// groups come in the memory of the host, too; the workspace is of as many bytes as the first function says.
std::size_t select_workspace(const Rows& rows, const Ranking& ranking, const std::vector<Large>& large);
void select(const Rows& rows, const Ranking& ranking, const std::vector<Large>& large, void* workspace,
            const Queue& queue);

// Optimal assignments for a stack of matrices, one block of threads for each; the workspace is of
// assign_workspace(stack) bytes.
void assign(const Stack& stack, void* workspace, const Queue& queue);

// The assignment of each row to its nearest column where these are distinct, with the duals that prove it, for matrices
// of any size: then `solved` of the problem is 1. Else it is 0, and of the results the faults alone hold.
void assign_nearest(const Stack& stack, std::int32_t* solved, void* workspace, const Queue& queue);

}  // namespace isthmus::cuda
