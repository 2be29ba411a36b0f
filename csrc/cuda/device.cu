// What was compiled, and what devices there are.

#include <sstream>

#include "launch.cuh"

namespace isthmus::cuda {

std::vector<std::string> architectures() {
    std::vector<std::string> names;
    std::istringstream list(ISTHMUS_CUDA_ARCHITECTURES);  // "80 90 100"
    for (std::string name; list >> name;) names.push_back("sm_" + name);
    return names;
}

int device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : (cudaGetLastError(), 0);
}

}  // namespace isthmus::cuda
