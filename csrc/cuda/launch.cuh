// Launching kernels on a queue. Sources include this header by angle brackets, so that tests can put one for the host
// in its place and run the kernels, the choice between them and their order as they stand there.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "api.h"
#include "team.cuh"

namespace isthmus::cuda {

constexpr int block_threads = 256;

inline void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw LaunchError(std::string(what) + ": " + cudaGetErrorString(status));
}

// Makes a queue's device the current one for the life of the object. `what` is to be done there.
class OnDevice {
   public:
    OnDevice(const Queue& queue, const char* what) {
        check(cudaGetDevice(&before_), what);
        if (before_ != queue.device) check(cudaSetDevice(queue.device), what);
        changed_ = before_ != queue.device;
    }
    ~OnDevice() {
        if (changed_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

   private:
    int before_ = 0;
    bool changed_ = false;
};

inline cudaStream_t stream_of(const Queue& queue) { return reinterpret_cast<cudaStream_t>(queue.stream); }

// As many blocks as the device runs at once, and no more than there is work for.
template <class Kernel>
unsigned persistent_grid(const char* name, Kernel kernel, std::int64_t work, const Queue& queue) {
    int processors = 0, resident = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, queue.device), name);
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, block_threads, 0), name);
    return static_cast<unsigned>(std::min<std::int64_t>(work, std::int64_t{processors} * std::max(resident, 1)));
}

// Launch a kernel that works through so many items with a persistent grid.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), std::int64_t work, const Queue& queue,
            const Arguments&... arguments) {
    if (work == 0) return;
    const OnDevice device(queue, name);
    kernel<<<persistent_grid(name, kernel, work, queue), block_threads, 0, stream_of(queue)>>>(arguments...);
    check(cudaGetLastError(), name);
}

// Set bytes in the memory of the device.
inline void fill(void* memory, int byte, std::size_t bytes, const Queue& queue) {
    const OnDevice device(queue, "isthmus: setting memory");
    check(cudaMemsetAsync(memory, byte, bytes, stream_of(queue)), "isthmus: setting memory");
}

}  // namespace isthmus::cuda
