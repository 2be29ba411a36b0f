// The loops for AVX2.

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

#ifdef ISTHMUS_X86_SETS
#include <immintrin.h>
#define ISTHMUS_STREAM 32
#define ISTHMUS_F16C

namespace isthmus::cpu {

#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi2")
namespace v3 {
#include "all.inl"
}  // namespace v3
#pragma GCC pop_options

const Loops v3_loops = v3::provided("v3");

}  // namespace isthmus::cpu
#endif
