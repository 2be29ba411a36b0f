// Teams of threads: what the threads of one block of a GPU do together.
//
// Bodies of algorithms are templates over a team, so that the host runs, in tests, what devices run: a team of one
// thread, or of several that meet at a barrier. A team has
//
//   rank(), size()          which thread this is, of how many
//   sync()                  waits for all; what they wrote before is seen by all after
//   sum(x), least(x)        of what all threads give, for all: no thread may leave them out
//   place(x, total)         the sum of what the threads before this one give, and the sum of all
//   tally(address, x)       adds the sum of what all threads give to a number that blocks share
//   add, minimum, set_bits  by one thread for itself, at an address that any thread may change at once
#pragma once

#include <cstdint>

#include "rules.h"

#if defined(__CUDACC__)
#define ISTHMUS_BODY __device__ __forceinline__
#define ISTHMUS_APART __device__ __noinline__  // long, and seldom run
#define ISTHMUS_UNROLL _Pragma("unroll")
#define ISTHMUS_UNROLL_BY_4 _Pragma("unroll 4")
#define ISTHMUS_ROLLED _Pragma("unroll 1")
#define ISTHMUS_GLOBAL(pointer) __builtin_assume(__isGlobal(pointer))  // what a table points to; else unknown
#else
#define ISTHMUS_BODY inline
#define ISTHMUS_APART inline
#define ISTHMUS_UNROLL
#define ISTHMUS_UNROLL_BY_4
#define ISTHMUS_ROLLED
#define ISTHMUS_GLOBAL(pointer)
#endif
