// The loops for every processor of an architecture.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "loops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define ISTHMUS_STREAM 16
#endif

namespace isthmus::cpu {
namespace base {
#include "all.inl"
}  // namespace base

const Loops base_loops = base::provided("base");

}  // namespace isthmus::cpu
