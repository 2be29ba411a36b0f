// Teams on the host: of members that meet, each on a stack of its own, or that take turns where they need not meet.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace host {

// What any thread may do for itself.
struct Shared {
    template <class T>
    T add(T* address, T x) const {
        return __atomic_fetch_add(address, x, __ATOMIC_SEQ_CST);
    }
    template <class T>
    void minimum(T* address, T x) const {
        T seen = __atomic_load_n(address, __ATOMIC_SEQ_CST);
        while (x < seen && !__atomic_compare_exchange_n(address, &seen, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        }
    }
    void set_bits(std::uint32_t* address, std::uint32_t bits) const {
        __atomic_fetch_or(address, bits, __ATOMIC_SEQ_CST);
    }
    template <class T>
    void tally(T* address, T x) const {
        if (x != 0) add(address, x);
    }
};

// One of several that take turns: for bodies in which no thread waits for another.
class Member : public Shared {
   public:
    Member(int rank, int size) : rank_(rank), size_(size) {}
    int rank() const { return rank_; }
    int size() const { return size_; }

   private:
    int rank_, size_;
};

// Members that meet: each runs until it waits for the others, then the next one does. All wait equally often, so that
// who is run again finds all others waiting.
class Team : public Shared {
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
        std::function<void(const Team&)> body;
    };

    Team(Meeting& meeting, int rank) : meeting_(&meeting), rank_(rank) {}
    int rank() const { return rank_; }
    int size() const { return static_cast<int>(meeting_->members.size()); }
    void sync() const {
        swapcontext(&meeting_->members[rank_].context, &meeting_->members[(rank_ + 1) % size()].context);
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

   private:
    template <class T>
    void put(T x) const {
        static_assert(sizeof(T) <= 64);
        __builtin_memcpy(meeting_->members[rank_].given, &x, sizeof x);
    }
    template <class T>
    T get(int rank) const {
        T x;
        __builtin_memcpy(&x, meeting_->members[rank].given, sizeof x);
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

    Meeting* meeting_;
    int rank_;
};

// Where a member begins; when it is done the next one goes on, after the last one who called the team.
inline void enter(unsigned high, unsigned low, int rank) {
    auto* meeting = reinterpret_cast<Team::Meeting*>(std::uintptr_t{high} << 32 | low);
    meeting->body(Team(*meeting, rank));
}

// Run body(team) on every member of a team.
template <class Body>
void with_team(int size, Body body) {
    Team::Meeting meeting(size);
    meeting.body = body;
    for (int rank = 0; rank < size; ++rank) {
        auto& [context, stack, given] = meeting.members[rank];
        getcontext(&context);
        context.uc_stack.ss_sp = stack.data();
        context.uc_stack.ss_size = stack.size();
        context.uc_link = rank + 1 < size ? &meeting.members[rank + 1].context : &meeting.outside;
        const auto address = reinterpret_cast<std::uintptr_t>(&meeting);
        makecontext(&context, reinterpret_cast<void (*)()>(enter), 3, static_cast<unsigned>(address >> 32),
                    static_cast<unsigned>(address), rank);
    }
    swapcontext(&meeting.outside, &meeting.members[0].context);
}

// Run body(member, block) for every block of a grid and every thread of it, in turn.
template <class Body>
void for_grid(std::int64_t blocks, int threads, Body body) {
    for (std::int64_t b = 0; b < blocks; ++b)
        for (int rank = 0; rank < threads; ++rank) body(Member(rank, threads), b);
}

}  // namespace host
