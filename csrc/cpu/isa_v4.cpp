// The loops for AVX-512.

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
#define ISTHMUS_STREAM 64
#define ISTHMUS_F16C

namespace isthmus::cpu {

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,bmi2,prefer-vector-width=512")
namespace v4 {
#include "all.inl"
}  // namespace v4
#pragma GCC pop_options

const Loops v4_loops = v4::provided("v4");

}  // namespace isthmus::cpu
#endif
