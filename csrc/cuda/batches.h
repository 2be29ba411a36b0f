// How the large groups of a selection are dealt into batches that the memory serves.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "plans.h"
#include "select.h"

namespace isthmus::cuda {

constexpr std::int64_t least_sample = 1 << 13, largest_sample = 1 << 19;  // keys of each group and model
constexpr std::int64_t pool_bytes = 1 << 26;  // for kept keys, beside one fiftieth of a model
constexpr std::int64_t widest = 8;            // the largest group of a batch to its smallest

struct Share {
    std::size_t first, groups;
    std::int64_t blocks, sample, capacity;
};

// Groups that follow each other and are of like sizes. All have brackets as narrow as the largest's sample makes them:
// a sample of m leaves about n / sqrt(m) keys in a bracket.
inline std::vector<Share> shares_of(const std::vector<Large>& large, std::int64_t searches, std::int64_t key_bytes,
                                    std::int64_t pool) {
    std::vector<Share> shares;
    for (std::size_t first = 0; first < large.size();) {
        std::int64_t least = large[first].elements, most = least, most_blocks = 0, blocks = 0;
        Share share{first, 0, 0, 0, 0};
        for (std::size_t l = first; l < large.size(); ++l) {
            const std::int64_t lower = std::min(least, large[l].elements), upper = std::max(most, large[l].elements);
            const std::int64_t longest = std::max(most_blocks, large[l].blocks);
            const double wanted = 0.4 * std::pow(static_cast<double>(upper), 0.75);
            const std::int64_t sample =
                lower < 4 * least_sample  // all is soon kept
                    ? 0
                    : std::clamp(static_cast<std::int64_t>(wanted), least_sample, std::min(largest_sample, lower / 4)) /
                          256 * 256;
            const auto inside = static_cast<std::int64_t>(
                sample == 0 ? upper : 1.1 * bracket_margin * upper / std::sqrt(static_cast<double>(sample)));
            const std::int64_t needed = std::max(sample, (longest * 4 + key_bytes - 1) / key_bytes);
            const auto groups = static_cast<std::int64_t>(l - first + 1);
            const std::int64_t room = pool / (groups * searches * key_bytes);
            const std::int64_t capacity = std::max(needed, std::min(inside, room)) / 8 * 8 + 8;
            const bool fits = upper <= widest * lower && room >= inside;
            if (l > first && !fits) break;
            least = lower;
            most = upper;
            most_blocks = longest;
            blocks += large[l].blocks;
            share = {first, l - first + 1, blocks, sample, capacity};
        }
        shares.push_back(share);
        first += share.groups;
    }
    return shares;
}

// A batch in a workspace, and how many bytes of it there are; `open` counts the searches that go on by digits.
template <class Key>
std::size_t place_batch(const Ranking& ranking, const Share& share, void* workspace, Batch<Key>& batch,
                        std::int64_t*& open) {
    batch = {ranking,
             ranking.large + share.first,
             static_cast<std::int64_t>(share.groups),
             share.blocks,
             share.sample,
             share.capacity,
             nullptr,
             nullptr,
             nullptr};
    const std::int64_t searches = static_cast<std::int64_t>(share.groups) * ranking.models * ranking.ranks;
    auto* at = static_cast<char*>(workspace);
    const auto take = [&](std::size_t bytes) {
        char* const from = at;
        at += (bytes + 15) / 16 * 16;
        return from;
    };
    open = reinterpret_cast<std::int64_t*>(take(sizeof(std::int64_t)));
    batch.counts = reinterpret_cast<std::int64_t*>(take(searches * digits * sizeof(std::int64_t)));
    batch.searches = reinterpret_cast<Search<Key>*>(take(searches * sizeof(Search<Key>)));
    batch.found = reinterpret_cast<Key*>(take(searches * share.capacity * sizeof(Key)));
    return at - static_cast<char*>(workspace);
}

// Call body with the types of the keys and of what they are made of.
template <class Body>
void with_keys(Dtype dtype, bool based, Body body) {
    switch (dtype) {
        case Dtype::f64: return body(std::int64_t{}, double{});
        case Dtype::f32: return body(std::int32_t{}, float{});
        case Dtype::f16: return body(std::int32_t{}, f16{});
        case Dtype::bf16: return based ? body(std::int32_t{}, bf16{}) : body(std::int16_t{}, bf16{});
    }
}

inline std::int64_t pool_of(const Rows& rows, const std::vector<Large>& large) {
    std::int64_t elements = 0;
    for (const Large& group : large) elements += group.elements;
    return pool_bytes + elements * size_of(rows.dtype) / 50;
}

// Call body(batch, open) for every batch of a selection.
template <class Key, class Body>
void for_batches(const Rows& rows, const Ranking& ranking, const std::vector<Large>& large, void* workspace,
                 Body body) {
    for (const Share& share : shares_of(large, ranking.models * ranking.ranks, sizeof(Key), pool_of(rows, large))) {
        Batch<Key> batch;
        std::int64_t* open;
        place_batch(ranking, share, workspace, batch, open);
        body(batch, open);
    }
}

// Bytes that serve every batch.
template <class Key>
std::size_t workspace_of(const Rows& rows, const Ranking& ranking, const std::vector<Large>& large) {
    std::size_t bytes = 0;
    for (const Share& share : shares_of(large, ranking.models * ranking.ranks, sizeof(Key), pool_of(rows, large))) {
        Batch<Key> batch;
        std::int64_t* open;
        bytes = std::max(bytes, place_batch(ranking, share, nullptr, batch, open));
    }
    return bytes;
}

}  // namespace isthmus::cuda
