// Gathers of units: runs of bytes that lie together in the source and in the result.
//
// Included after loops.inl.

// Copy units of between Half and 2 * Half bytes, each as two halves that may overlap.
template <int Half, class Offset>
void gather_halves(const char* source, const Offset* offsets, std::int64_t count, std::int64_t unit,
                   char* __restrict__ out) {
    const std::int64_t second = unit - Half;
    for (std::int64_t i = 0; i < count; ++i, out += unit) {
        const char* x = source + offsets[i];
        char first[Half], last[Half];
        std::memcpy(first, x, Half);
        std::memcpy(last, x + second, Half);
        std::memcpy(out, first, Half);
        std::memcpy(out + second, last, Half);
    }
}

// Units of the size of one element.
template <class Element, class Offset>
void gather_elements(const char* source, const Offset* offsets, std::int64_t count, char* __restrict__ out) {
    for (std::int64_t i = 0; i < count; ++i)
        std::memcpy(out + i * sizeof(Element), source + offsets[i], sizeof(Element));
}

// out = the units of `unit` bytes at source + offsets[0], source + offsets[1], ...
template <class Offset>
void gather(const char* source, const Offset* offsets, std::int64_t count, std::int64_t unit, char* out) {
    switch (unit) {
        case 1: return gather_elements<std::uint8_t>(source, offsets, count, out);
        case 2: return gather_elements<std::uint16_t>(source, offsets, count, out);
        case 4: return gather_elements<std::uint32_t>(source, offsets, count, out);
        case 8: return gather_elements<std::uint64_t>(source, offsets, count, out);
    }
    if (unit <= 4) return gather_halves<2>(source, offsets, count, unit, out);
    if (unit <= 8) return gather_halves<4>(source, offsets, count, unit, out);
    if (unit <= 16) return gather_halves<8>(source, offsets, count, unit, out);
    if (unit <= 32) return gather_halves<16>(source, offsets, count, unit, out);
    if (unit <= 64) return gather_halves<32>(source, offsets, count, unit, out);
    if (unit <= 128) return gather_halves<64>(source, offsets, count, unit, out);
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(out + i * unit, source + offsets[i], unit);
}
