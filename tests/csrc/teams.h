// Teams on the host: blocks of threads that meet, each thread on a stack of its own.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace host {

// The thread that runs, its block, and how many of either there are.
struct Index {
    unsigned x;
};
inline Index thread, threads, block, blocks;

// Members run until they wait for the others, each in turn. All wait equally often, so that who is run again finds all
// others waiting. What a member does until then is one step to the others.
class Team {
   public:
    struct Meeting {
        struct Member {
            ucontext_t context;
            std::vector<char> stack = std::vector<char>(1 << 18);
            alignas(16) unsigned char given[64];
        };
        explicit Meeting(int size) : members(size) {}
        std::vector<Member> members;
        ucontext_t outside;
        std::function<void()> body;
    };
    static inline Meeting* meeting = nullptr;  // of the threads that run

    int rank() const { return rank_; }
    int size() const { return static_cast<int>(meeting->members.size()); }
    void sync() const {
        swapcontext(&meeting->members[rank_].context, &meeting->members[(rank_ + 1) % size()].context);
        thread.x = rank_;
    }

    template <class T>
    T sum(T x) const {
        return fold(x, [](T a, T b) { return a + b; });
    }
    template <class T>
    T least(T x) const {
        return fold(x, [](T a, T b) { return b < a ? b : a; });
    }
    template <class T>
    T place(T x, T& total) const {
        put(x);
        sync();
        T before{};
        total = T{};
        for (int r = 0; r < size(); ++r) {
            if (r == rank_) before = total;
            total = total + get<T>(r);
        }
        sync();
        return before;
    }

    template <class T>
    T add(T* address, T x) const {
        return std::exchange(*address, *address + x);
    }
    void minimum(std::int64_t* address, std::int64_t x) const { *address = std::min(*address, x); }
    void set_bits(std::uint32_t* address, std::uint32_t bits) const { *address |= bits; }
    template <class T>
    void tally(T* address, T x) const {
        add(address, x);
    }

   private:
    template <class T>
    void put(T x) const {
        static_assert(sizeof(T) <= 64);
        __builtin_memcpy(meeting->members[rank_].given, &x, sizeof x);
    }
    template <class T>
    T get(int rank) const {
        T x;
        __builtin_memcpy(&x, meeting->members[rank].given, sizeof x);
        return x;
    }
    template <class T, class Op>
    T fold(T x, Op op) const {
        put(x);
        sync();
        T result = get<T>(0);
        for (int r = 1; r < size(); ++r) result = op(result, get<T>(r));
        sync();
        return result;
    }

    int rank_ = static_cast<int>(thread.x);
};

// Where a member begins; when it is done the next one goes on, after the last one who called the team.
inline void enter(int rank) {
    thread.x = rank;
    Team::meeting->body();
}

// Run body() on every member of a team.
template <class Body>
void with_team(int size, Body body) {
    Team::Meeting meeting(size);
    meeting.body = body;
    Team::meeting = &meeting;
    for (int rank = 0; rank < size; ++rank) {
        auto& [context, stack, given] = meeting.members[rank];
        getcontext(&context);
        context.uc_stack.ss_sp = stack.data();
        context.uc_stack.ss_size = stack.size();
        context.uc_link = rank + 1 < size ? &meeting.members[rank + 1].context : &meeting.outside;
        makecontext(&context, reinterpret_cast<void (*)()>(enter), 1, rank);
    }
    swapcontext(&meeting.outside, &meeting.members[0].context);
}

}  // namespace host
