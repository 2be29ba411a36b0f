// The team of all threads of a block; see ../team.h. Its size is a multiple of 32.
#pragma once

#include "../dtypes.h"
#include "../team.h"

namespace isthmus::cuda {

class BlockTeam {
   public:
    __device__ int rank() const { return threadIdx.x; }
    __device__ int size() const { return blockDim.x; }
    __device__ void sync() const { __syncthreads(); }

    template <class T>
    __device__ T sum(T x) const {
        return reduce(x, [](T a, T b) { return a + b; });
    }
    template <class T>
    __device__ T least(T x) const {
        return reduce(x, [](T a, T b) { return b < a ? b : a; });
    }

    template <class T>
    __device__ T place(T x, T& total) const {
        T inclusive = x;
        for (int distance = 1; distance < 32; distance *= 2) {
            const T other = shuffle_up(inclusive, distance);
            if (lane() >= distance) inclusive = inclusive + other;
        }
        __shared__ Slots<T> slots;
        if (lane() == 31) slots[warp()] = inclusive;
        __syncthreads();
        T before{};
        total = T{};
        for (int w = 0; w < size() / 32; ++w) {
            if (w == warp()) before = total;
            total = total + slots[w];
        }
        __syncthreads();
        return before + inclusive - x;
    }

    template <class T>
    __device__ void tally(T* address, T x) const {
        for (int distance = 16; distance > 0; distance /= 2) x = x + shuffle_down(x, distance);
        if (lane() == 0 && x != 0) add(address, x);
    }
    __device__ std::int64_t add(std::int64_t* address, std::int64_t x) const {
        return atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(x));
    }
    __device__ std::uint32_t add(std::uint32_t* address, std::uint32_t x) const { return atomicAdd(address, x); }
    __device__ std::int32_t add(std::int32_t* address, std::int32_t x) const { return atomicAdd(address, x); }
    __device__ void minimum(std::int64_t* address, std::int64_t x) const {
        atomicMin(reinterpret_cast<long long*>(address), static_cast<long long>(x));
    }
    __device__ void set_bits(std::uint32_t* address, std::uint32_t bits) const { atomicOr(address, bits); }

   private:
    template <class T>
    using Slots = T[32];

    __device__ int lane() const { return threadIdx.x % 32; }
    __device__ int warp() const { return threadIdx.x / 32; }

    template <class T>
    struct Pieces {
        std::uint32_t words[(sizeof(T) + 3) / 4];
    };
    template <class T, class Move>
    __device__ T moved(T x, Move move) const {
        static_assert(sizeof(T) % 4 == 0);
        auto pieces = bit_cast<Pieces<T>>(x);
        for (std::uint32_t& word : pieces.words) word = move(word);
        return bit_cast<T>(pieces);
    }
    template <class T>
    __device__ T shuffle_up(T x, int distance) const {
        return moved(x, [&](std::uint32_t word) { return __shfl_up_sync(0xffffffffu, word, distance); });
    }
    template <class T>
    __device__ T shuffle_down(T x, int distance) const {
        return moved(x, [&](std::uint32_t word) { return __shfl_down_sync(0xffffffffu, word, distance); });
    }

    template <class T, class Op>
    __device__ T reduce(T x, Op op) const {
        for (int distance = 16; distance > 0; distance /= 2) x = op(x, shuffle_down(x, distance));
        __shared__ Slots<T> slots;
        if (lane() == 0) slots[warp()] = x;
        __syncthreads();
        T result = slots[0];
        for (int w = 1; w < size() / 32; ++w) result = op(result, slots[w]);
        __syncthreads();
        return result;
    }
};

}  // namespace isthmus::cuda
