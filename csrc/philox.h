// Philox4x32-10, a counter-based generator: the random words of an element depend on its key and place alone.
//
// J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

#include "rules.h"

namespace isthmus {

struct Words {
    std::uint32_t x0, x1, x2, x3;
};

ISTHMUS_RULE Words philox(Words counter, std::uint32_t key0, std::uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t p0 = std::uint64_t{0xD2511F53} * counter.x0, p1 = std::uint64_t{0xCD9E8D57} * counter.x2;
        counter = {std::uint32_t(p1 >> 32) ^ counter.x1 ^ key0, std::uint32_t(p1),
                   std::uint32_t(p0 >> 32) ^ counter.x3 ^ key1, std::uint32_t(p0)};
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return counter;
}

}  // namespace isthmus
