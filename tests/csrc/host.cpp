// The functions of csrc/cuda/api.h on the host: the bodies of the kernels and their index arithmetic, with blocks and
// threads as loops, or as members of a team that meet where they work together. Memory of the device is the host's.

#include <algorithm>
#include <cstring>

#include "../../csrc/cuda/api.h"
#include "../../csrc/cuda/assign.h"
#include "../../csrc/cuda/batches.h"
#include "../../csrc/cuda/elementwise.h"
#include "../../csrc/cuda/merge.h"
#include "teams.h"

namespace isthmus::cuda {

namespace {

constexpr int members = 5;  // of a team: no divisor of anything

template <class Body>
void with_stored(Dtype dtype, Body body) {
    switch (dtype) {
        case Dtype::f64: return body(double{});
        case Dtype::f32: return body(float{});
        case Dtype::bf16: return body(bf16{});
        case Dtype::f16: return body(f16{});
    }
}

// Run body(team, item) for so many items, each by a team that meets.
template <class Body>
void for_teams(std::int64_t items, Body body) {
    if (items == 0) return;
    host::with_team(members, [&](const host::Team& team) {
        for (std::int64_t item = 0; item < items; ++item) {
            body(team, item);
            team.sync();  // the next item uses the same shared memory
        }
    });
}

template <class Key, class S>
void run(const Rows& rows, const Batch<Key>& batch, std::int64_t* open) {
    std::uint32_t counts[digits];
    std::memset(open, 0, reinterpret_cast<char*>(batch.searches) - reinterpret_cast<char*>(open));
    for (std::int64_t s = 0; s < batch.total(); ++s) begin_search(batch, s);
    for (std::int64_t item = 0; item < batch.groups * batch.sample; ++item) take_sample<Key, S>(rows, batch, item);
    for_teams(batch.total(), [&](const auto& team, std::int64_t s) { bracket_search(team, batch, s, counts); });
    for_teams(batch.blocks, [&](const auto& team, std::int64_t w) { sort_block<Key, S>(team, rows, batch, w); });
    for_teams(batch.total(), [&](const auto& team, std::int64_t s) { conclude(team, batch, s, counts, open); });
    for (int bits = 8 * sizeof(Key) - 1; bits > 0; bits -= digit_bits) {
        const std::int64_t shares = std::min<std::int64_t>(batch.blocks, 4);
        if (*open != 0)
            for_teams(shares, [&](const auto& team, std::int64_t b) {
                count_digits<Key, S>(team, rows, batch, batch.blocks * b / shares, batch.blocks * (b + 1) / shares,
                                     counts);
            });
        for_teams(batch.total(), [&](const auto& team, std::int64_t s) { narrow_search(team, batch, s, open); });
    }
    if (batch.ranking.exact)
        for_teams(batch.blocks, [&](const auto& team, std::int64_t w) { count_equal<Key, S>(team, rows, batch, w); });
    for_teams(batch.total(), [&](const auto& team, std::int64_t s) { finish_search<Key, S>(team, rows, batch, s); });
}

template <class T>
void assign_typed(const Stack& stack, void* workspace) {
    for_teams(stack.problems,
              [&](const auto& team, std::int64_t p) { assign_all(team, problem_of<T>(stack, workspace, p)); });
}

template <class T>
void assign_nearest_typed(const Stack& stack, std::int32_t* solved, void* workspace) {
    for_teams(stack.problems * stack.rows, [&](const auto& team, std::int64_t item) {
        const std::int64_t p = item / stack.rows;
        match_row(team, problem_of<T>(stack, workspace, p), item % stack.rows, invalid_of(workspace, p));
    });
    for_teams(stack.problems, [&](const auto& team, std::int64_t p) {
        const std::int32_t distinct = match_all(team, problem_of<T>(stack, workspace, p), *invalid_of(workspace, p));
        if (team.rank() == 0) solved[p] = distinct;
    });
}

template <class S, Vote V, int Models, bool AtRandom>
void consensus_typed(const Rows& rows, const Plan& plan, const Sweep& sweep) {
    host::for_grid(rows.blocks, members, [&](const auto& team, std::int64_t b) {
        consensus_block<S, V, Models, AtRandom>(team, rows, plan, sweep, b);
    });
}

// As few kinds of code as there may be: those that keep entries in registers for up to four models.
template <class S>
bool in_registers(const Rows& rows, const Plan& plan, const Sweep& sweep) {
    if (plan.merge == MergeFunc::max || sweep.kept != nullptr || rows.width - plan.based > 4) return false;
    if (plan.random.keys != nullptr) {
        if (plan.vote == Vote::total) return consensus_typed<S, Vote::total, 4, true>(rows, plan, sweep), true;
        return false;
    }
    switch (plan.vote) {
        case Vote::none: consensus_typed<S, Vote::none, 4, false>(rows, plan, sweep); break;
        case Vote::total: consensus_typed<S, Vote::total, 4, false>(rows, plan, sweep); break;
        case Vote::weighted_total: consensus_typed<S, Vote::weighted_total, 4, false>(rows, plan, sweep); break;
        case Vote::frequency: consensus_typed<S, Vote::frequency, 4, false>(rows, plan, sweep); break;
    }
    return true;
}

}  // namespace

std::vector<std::string> architectures() { return {"host"}; }
int device_count() { return 1; }

void lerp(const Rows& rows, const double* weights, bool per_row, const Queue&) {
    with_stored(rows.dtype, [&](auto stored) {
        host::for_grid(rows.blocks, members, [&](const auto& team, std::int64_t b) {
            lerp_block<decltype(stored)>(team, rows, weights, per_row, b);
        });
    });
}

void weighted_sum(const Rows& rows, const double* weights, bool per_row, const Queue&) {
    with_stored(rows.dtype, [&](auto stored) {
        host::for_grid(rows.blocks, members, [&](const auto& team, std::int64_t b) {
            weighted_sum_block<decltype(stored)>(team, rows, weights, per_row, b);
        });
    });
}

void consensus(const Rows& rows, const Plan& plan, const Sweep& sweep, const Queue&) {
    with_stored(rows.dtype, [&](auto stored) {
        using S = decltype(stored);
        if constexpr (sizeof(S) < 8)
            if (in_registers<S>(rows, plan, sweep)) return;
        host::for_grid(rows.blocks, members, [&](const auto& team, std::int64_t b) {
            if (plan.random.keys != nullptr)
                any_consensus_block<S, true>(team, rows, plan, sweep, b);
            else
                any_consensus_block<S, false>(team, rows, plan, sweep, b);
        });
    });
}

std::size_t select_workspace(const Rows& rows, const Ranking& ranking, const std::vector<Large>& large) {
    std::size_t bytes = 0;
    with_keys(rows.dtype, ranking.based,
              [&](auto key, auto) { bytes = workspace_of<decltype(key)>(rows, ranking, large); });
    return bytes;
}

void select(const Rows& rows, const Ranking& ranking, const std::vector<Large>& large, void* workspace, const Queue&) {
    with_keys(rows.dtype, ranking.based, [&](auto key, auto stored) {
        using Key = decltype(key);
        using S = decltype(stored);
        std::uint32_t counts[digits];
        if (!ranking.whole)
            for_teams(ranking.groups * ranking.models, [&](const auto& team, std::int64_t item) {
                select_small<Key, S>(team, rows, ranking, item, counts);
            });
        for_batches<Key>(rows, ranking, large, workspace,
                         [&](const Batch<Key>& batch, std::int64_t* open) { run<Key, S>(rows, batch, open); });
    });
}

void assign(const Stack& stack, void* workspace, const Queue&) {
    stack.dtype == Dtype::f64 ? assign_typed<double>(stack, workspace) : assign_typed<float>(stack, workspace);
}

void assign_nearest(const Stack& stack, std::int32_t* solved, void* workspace, const Queue&) {
    std::memset(workspace, 0x7f, stack.problems * problem_bytes);
    stack.dtype == Dtype::f64 ? assign_nearest_typed<double>(stack, solved, workspace)
                              : assign_nearest_typed<float>(stack, solved, workspace);
}

}  // namespace isthmus::cuda
