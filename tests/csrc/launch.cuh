// What csrc/cuda/*.cu launch with, on the host: blocks follow each other, and their threads are members of a team.
// Memory of the device is the host's.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../../csrc/cuda/api.h"
#include "teams.h"

#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define blockIdx host::block
#define gridDim host::blocks
#define blockDim host::threads
#define threadIdx host::thread

namespace isthmus::cuda {

constexpr int block_threads = 5;          // no divisor of anything
constexpr std::int64_t largest_grid = 3;  // fewer blocks than there is work for, as on a device

using BlockTeam = host::Team;

inline std::vector<const void*> launched;  // the kernels, in their order

template <class... Parameters, class... Arguments>
void launch(const char*, void (*kernel)(Parameters...), std::int64_t work, const Queue&,
            const Arguments&... arguments) {
    if (work == 0) return;
    launched.push_back(reinterpret_cast<const void*>(kernel));
    gridDim.x = static_cast<unsigned>(std::min(work, largest_grid));
    blockDim.x = block_threads;
    host::with_team(block_threads, [&] {
        for (unsigned b = 0; b < gridDim.x; ++b) {
            blockIdx.x = b;
            kernel(arguments...);
            BlockTeam{}.sync();  // all are done with the memory that the block shares
        }
    });
}

inline void fill(void* memory, int byte, std::size_t bytes, const Queue&) { std::memset(memory, byte, bytes); }

}  // namespace isthmus::cuda
