// Philox4x32-10, a counter-based generator: the random words of an element depend on its key and place alone.
//
// J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
//
// Included within a namespace, once for each instruction set: functions over vectors must be compiled for theirs.

// Four words, or vectors of words, each in the lower half of 64 bits; the upper halves may hold anything.
template <class Word>
struct Words {
    Word x0, x1, x2, x3;
};

// The product of the lower halves.
ISTHMUS_RULE std::uint64_t multiply_low(std::uint64_t x, std::uint32_t factor) {
    return std::uint64_t{static_cast<std::uint32_t>(x)} * factor;
}

// The upper half, in the lower half.
ISTHMUS_RULE std::uint64_t upper_half(std::uint64_t x) { return x >> 32; }

// The keys of the rounds.
template <class Word>
struct KeySchedule {
    static constexpr int rounds = 10;
    Word key0[rounds], key1[rounds];

    ISTHMUS_RULE KeySchedule(std::uint32_t k0, std::uint32_t k1) {
        for (int round = 0; round < rounds; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
            key0[round] = Word{} + k0;
            key1[round] = Word{} + k1;
        }
    }
};

template <class Word>
ISTHMUS_RULE Words<Word> philox(Words<Word> counter, const KeySchedule<Word>& keys) {
    for (int round = 0; round < KeySchedule<Word>::rounds; ++round) {
        const Word p0 = multiply_low(counter.x0, 0xD2511F53), p1 = multiply_low(counter.x2, 0xCD9E8D57);
        counter = {upper_half(p1) ^ counter.x1 ^ keys.key0[round], p1, upper_half(p0) ^ counter.x3 ^ keys.key1[round],
                   p0};
    }
    return counter;
}
