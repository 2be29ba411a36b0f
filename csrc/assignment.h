// Linear assignment by shortest augmenting paths, by a team of threads.
//
// The search of cpu/assign_rows.inl: with a dual v for each column, w(i, j) = c(i, j) - v(j) says how near column j is
// to row i. What is found is the same for every size of team: of equally near columns an unmatched one comes first,
// then the one with the lower index; of equally long ways to a column, the one by the row scanned first. Bodies that
// the host can run, too; nothing is multiplied but by a sign, so that all sums are those of the host.
#pragma once

#include <cstdint>
#include <limits>

#include "team.h"

namespace isthmus {

constexpr double no_way = std::numeric_limits<double>::infinity();

// One problem, of no more rows than columns and at least one; its results, and memory for its columns.
template <class T>
struct Assigning {
    const T* costs;  // row after row
    std::int64_t rows, cols;
    bool maximize;  // costs are the values negated
    const double* start;
    std::int64_t* columns;  // of each row
    double *u, *v;          // v: always, u: or none
    double *primal, *dual;
    std::int64_t* fault;  // its kind, row and column
    // [column]
    double* open;          // distances of columns that were reached
    std::int32_t* owner;   // the row that a column is matched with, or -1
    std::int32_t* from;    // the row that a column was reached from
    std::int32_t* closed;  // whether it was gone through

    ISTHMUS_BODY double cost(std::int64_t i, std::int64_t j) const {
        const T value = costs[i * cols + j];
        return static_cast<double>(maximize ? -value : value);
    }
};
enum : std::int64_t { fault_none, fault_nan, fault_unbounded, fault_infeasible };

// A column and how far it is; unmatched ones are before matched ones.
struct Nearest {
    double distance = no_way;
    std::int32_t matched = 1, column = std::numeric_limits<std::int32_t>::max();

    ISTHMUS_BODY bool operator<(const Nearest& other) const {
        if (distance != other.distance) return distance < other.distance;
        return matched != other.matched ? matched < other.matched : column < other.column;
    }
};

// The nearest column of a row.
template <class T, class Team>
ISTHMUS_BODY Nearest nearest_of(const Team& team, const Assigning<T>& problem, const double* v, std::int64_t i) {
    Nearest nearest;
    for (std::int64_t j = team.rank(); j < problem.cols; j += team.size()) {
        const Nearest here{problem.cost(i, j) - (v != nullptr ? v[j] : 0.0), 0, static_cast<std::int32_t>(j)};
        if (here < nearest) nearest = here;
    }
    return team.least(nearest);
}

// The first entry that is NaN or minus infinity, or the number of all. NaN compares like neither.
template <class T, class Team>
ISTHMUS_BODY std::int64_t first_invalid(const Team& team, const Assigning<T>& problem, std::int64_t from,
                                        std::int64_t to) {
    std::int64_t first = problem.rows * problem.cols;
    for (std::int64_t e = from + team.rank(); e < to && e < first; e += team.size())
        if (!(problem.cost(0, e) > -no_way)) first = e;
    return team.least(first);
}

template <class T>
ISTHMUS_BODY void write_fault(const Assigning<T>& problem, std::int64_t entry) {
    const double cost = problem.cost(0, entry);
    problem.fault[0] = cost == cost ? fault_unbounded : fault_nan;
    problem.fault[1] = entry / problem.cols;
    problem.fault[2] = entry % problem.cols;
}

// Match an unmatched row; returns false where no column is left to it.
template <class T, class Team>
ISTHMUS_BODY bool augment(const Team& team, const Assigning<T>& problem, std::int64_t root) {
    for (std::int64_t j = team.rank(); j < problem.cols; j += team.size()) {
        problem.open[j] = no_way;
        problem.closed[j] = 0;
    }
    std::int64_t row = root;
    double offset = 0;
    Nearest nearest;
    for (;;) {
        nearest = {};
        for (std::int64_t j = team.rank(); j < problem.cols; j += team.size()) {  // each column is one thread's
            if (problem.closed[j] != 0) continue;
            const double through_row = offset + (problem.cost(row, j) - problem.v[j]);
            if (through_row < problem.open[j]) {
                problem.open[j] = through_row;
                problem.from[j] = static_cast<std::int32_t>(row);
            }
            const Nearest here{problem.open[j], problem.owner[j] >= 0, static_cast<std::int32_t>(j)};
            if (here < nearest) nearest = here;
        }
        nearest = team.least(nearest);
        if (nearest.distance == no_way) return false;
        if (nearest.matched == 0) break;
        const std::int64_t column = nearest.column;
        if (column % team.size() == team.rank()) problem.closed[column] = 1;
        row = problem.owner[column];
        offset = nearest.distance - (problem.cost(row, column) - problem.v[column]);
    }
    for (std::int64_t j = team.rank(); j < problem.cols; j += team.size())
        if (problem.closed[j] != 0) problem.v[j] -= nearest.distance - problem.open[j];
    if (team.rank() == 0) {
        for (std::int64_t column = nearest.column;;) {
            const std::int64_t along = problem.from[column], next = problem.columns[along];
            problem.columns[along] = column;
            problem.owner[column] = static_cast<std::int32_t>(along);
            if (along == root) break;
            column = next;
        }
    }
    team.sync();
    return true;
}

// The cost and the bound, which are sums in order, by one thread.
template <class T>
ISTHMUS_BODY void add_up(const Assigning<T>& problem) {
    double primal = 0, dual = 0;
    for (std::int64_t i = 0; i < problem.rows; ++i) {
        primal += problem.cost(i, problem.columns[i]);
        dual += problem.u[i];
    }
    for (std::int64_t j = 0; j < problem.cols; ++j) dual += problem.v[j];
    *problem.primal = primal;
    *problem.dual = dual;
}

// Solve a problem from beginning to end.
template <class T, class Team>
ISTHMUS_BODY void assign_all(const Team& team, const Assigning<T>& problem) {
    for (std::int64_t i = team.rank(); i < problem.rows; i += team.size()) problem.columns[i] = -1;
    for (std::int64_t j = team.rank(); j < problem.cols; j += team.size()) {
        problem.v[j] = problem.start != nullptr ? problem.start[j] : 0.0;
        problem.owner[j] = -1;
    }
    const std::int64_t entries = problem.rows * problem.cols;
    const std::int64_t invalid = first_invalid(team, problem, 0, entries);
    if (team.rank() == 0) {
        problem.fault[0] = fault_none;
        problem.fault[1] = problem.fault[2] = -1;
        if (invalid < entries) write_fault(problem, invalid);
    }
    if (invalid < entries) return;
    for (std::int64_t i = 0; i < problem.rows; ++i) {
        const Nearest nearest = nearest_of(team, problem, problem.v, i);
        if (team.rank() == 0 && nearest.distance < no_way && problem.owner[nearest.column] < 0) {
            problem.owner[nearest.column] = static_cast<std::int32_t>(i);
            problem.columns[i] = nearest.column;
        }
    }
    team.sync();
    for (std::int64_t i = 0; i < problem.rows; ++i) {
        if (problem.columns[i] >= 0 || augment(team, problem, i)) continue;
        if (team.rank() == 0) {
            problem.fault[0] = fault_infeasible;
            problem.fault[1] = i;
        }
        return;
    }
    if (problem.u == nullptr) return;
    for (std::int64_t i = 0; i < problem.rows; ++i) {
        const Nearest nearest = nearest_of(team, problem, problem.v, i);
        if (team.rank() == 0) problem.u[i] = nearest.distance;
    }
    if (team.rank() == 0) add_up(problem);
}

// --- the shortcut: each row and its nearest column
// --------------------------------------------------------------------

// One row: its nearest column and its dual; `invalid` is lowered to the first entry that is not valid.
template <class T, class Team>
ISTHMUS_BODY void match_row(const Team& team, const Assigning<T>& problem, std::int64_t i, std::int64_t* invalid) {
    const std::int64_t entries = problem.rows * problem.cols;
    const std::int64_t first = first_invalid(team, problem, i * problem.cols, (i + 1) * problem.cols);
    const Nearest nearest = nearest_of(team, problem, problem.start, i);
    if (team.rank() != 0) return;
    if (first < entries) team.minimum(invalid, first);
    problem.columns[i] = nearest.distance < no_way ? nearest.column : -1;
    if (problem.u != nullptr) problem.u[i] = nearest.distance;
}

// Whether all rows have found columns of their own, which then are the answer; `owner` counts. Returns 1 or 0.
template <class T, class Team>
ISTHMUS_BODY std::int32_t match_all(const Team& team, const Assigning<T>& problem, std::int64_t invalid) {
    for (std::int64_t j = team.rank(); j < problem.cols; j += team.size()) {
        problem.v[j] = problem.start != nullptr ? problem.start[j] : 0.0;
        problem.owner[j] = 0;
    }
    team.sync();
    const bool valid = invalid >= problem.rows * problem.cols;
    std::int32_t distinct = valid;
    for (std::int64_t i = team.rank(); valid && i < problem.rows; i += team.size()) {
        const std::int64_t j = problem.columns[i];
        if (j < 0 || team.add(problem.owner + j, std::int32_t{1}) != 0) distinct = 0;
    }
    distinct = team.least(distinct);
    if (team.rank() == 0) {
        problem.fault[0] = fault_none;
        problem.fault[1] = problem.fault[2] = -1;
        if (!valid) write_fault(problem, invalid);
        if (distinct != 0 && problem.u != nullptr) add_up(problem);
    }
    return distinct;
}

}  // namespace isthmus
