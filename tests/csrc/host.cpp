// csrc/cuda on the host: the very sources, with the launches of launch.cuh beside this file.

#include "../../csrc/cuda/assign.cu"
#include "../../csrc/cuda/rules.cu"
#include "../../csrc/cuda/select.cu"

namespace isthmus::cuda {

std::vector<std::string> architectures() { return {"host"}; }
int device_count() { return 1; }

}  // namespace isthmus::cuda

// The kernels launched since this was last asked for, in their order: at most `size` distances in memory from this
// function, and how many there were.
extern "C" __attribute__((visibility("default"))) std::int64_t take_launched(std::int64_t* distances,
                                                                             std::int64_t size) {
    auto& launched = isthmus::cuda::launched;
    const auto all = static_cast<std::int64_t>(launched.size());
    const auto origin = reinterpret_cast<std::intptr_t>(&take_launched);
    for (std::int64_t i = 0; i < std::min(all, size); ++i)
        distances[i] = reinterpret_cast<std::intptr_t>(launched[i]) - origin;
    launched.clear();
    return all;
}
