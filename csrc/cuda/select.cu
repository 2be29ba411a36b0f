// Selection of the k-th largest magnitudes.

#include <launch.cuh>

#include "batches.h"

namespace isthmus::cuda {

namespace {

template <class Key, class S>
__global__ void __launch_bounds__(block_threads) small_kernel(Rows rows, Ranking ranking) {
    __shared__ std::uint32_t counts[digits];
    for (std::int64_t item = blockIdx.x; item < ranking.groups * ranking.models; item += gridDim.x)
        select_small<Key, S>(BlockTeam{}, rows, ranking, item, counts);
}

template <class Key>
__global__ void __launch_bounds__(block_threads) begin_kernel(Batch<Key> batch) {
    for (std::int64_t s = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; s < batch.total();
         s += std::int64_t{gridDim.x} * blockDim.x)
        begin_search(batch, s);
}

template <class Key, class S>
__global__ void __launch_bounds__(block_threads) sample_kernel(Rows rows, Batch<Key> batch) {
    for (std::int64_t item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < batch.groups * batch.sample;
         item += std::int64_t{gridDim.x} * blockDim.x)
        take_sample<Key, S>(rows, batch, item);
}

template <class Key>
__global__ void __launch_bounds__(block_threads) bracket_kernel(Batch<Key> batch) {
    __shared__ std::uint32_t counts[digits];
    for (std::int64_t s = blockIdx.x; s < batch.total(); s += gridDim.x) bracket_search(BlockTeam{}, batch, s, counts);
}

template <class Key, class S>
__global__ void __launch_bounds__(block_threads) sort_kernel(Rows rows, Batch<Key> batch) {
    for (std::int64_t w = blockIdx.x; w < batch.blocks; w += gridDim.x) sort_block<Key, S>(BlockTeam{}, rows, batch, w);
}

template <class Key>
__global__ void __launch_bounds__(block_threads) conclude_kernel(Batch<Key> batch, std::int64_t* open) {
    __shared__ std::uint32_t counts[digits];
    for (std::int64_t s = blockIdx.x; s < batch.total(); s += gridDim.x) conclude(BlockTeam{}, batch, s, counts, open);
}

template <class Key, class S>
__global__ void __launch_bounds__(block_threads) digits_kernel(Rows rows, Batch<Key> batch, const std::int64_t* open) {
    __shared__ std::uint32_t counts[digits];
    if (*open == 0) return;
    count_digits<Key, S>(BlockTeam{}, rows, batch, batch.blocks * blockIdx.x / gridDim.x,
                         batch.blocks * (blockIdx.x + std::int64_t{1}) / gridDim.x, counts);
}

template <class Key>
__global__ void __launch_bounds__(block_threads) narrow_kernel(Batch<Key> batch, std::int64_t* open) {
    for (std::int64_t s = blockIdx.x; s < batch.total(); s += gridDim.x) narrow_search(BlockTeam{}, batch, s, open);
}

template <class Key, class S>
__global__ void __launch_bounds__(block_threads) equal_kernel(Rows rows, Batch<Key> batch) {
    for (std::int64_t w = blockIdx.x; w < batch.blocks; w += gridDim.x)
        count_equal<Key, S>(BlockTeam{}, rows, batch, w);
}

template <class Key, class S>
__global__ void __launch_bounds__(block_threads) finish_kernel(Rows rows, Batch<Key> batch) {
    for (std::int64_t s = blockIdx.x; s < batch.total(); s += gridDim.x)
        finish_search<Key, S>(BlockTeam{}, rows, batch, s);
}

template <class Key, class S>
void run(const Rows& rows, const Batch<Key>& batch, std::int64_t* open, const Queue& queue) {
    const std::int64_t searches = batch.total();
    fill(open, 0, reinterpret_cast<char*>(batch.searches) - reinterpret_cast<char*>(open), queue);
    launch("isthmus select: begin", begin_kernel<Key>, searches, queue, batch);
    launch("isthmus select: sample", sample_kernel<Key, S>, batch.groups * batch.sample / block_threads, queue, rows,
           batch);
    launch("isthmus select: bracket", bracket_kernel<Key>, searches, queue, batch);
    launch("isthmus select: sweep", sort_kernel<Key, S>, batch.blocks, queue, rows, batch);
    launch("isthmus select: conclude", conclude_kernel<Key>, searches, queue, batch, open);
    for (int bits = 8 * sizeof(Key) - 1; bits > 0; bits -= digit_bits) {
        launch("isthmus select: digits", digits_kernel<Key, S>, batch.blocks, queue, rows, batch, open);
        launch("isthmus select: narrow", narrow_kernel<Key>, searches, queue, batch, open);
    }
    if (batch.ranking.exact) launch("isthmus select: equal", equal_kernel<Key, S>, batch.blocks, queue, rows, batch);
    launch("isthmus select: finish", finish_kernel<Key, S>, searches, queue, rows, batch);
}

}  // namespace

std::size_t select_workspace(const Rows& rows, const Ranking& ranking, const std::vector<Large>& large) {
    std::size_t bytes = 0;
    with_keys(rows.dtype, ranking.based,
              [&](auto key, auto) { bytes = workspace_of<decltype(key)>(rows, ranking, large); });
    return bytes;
}

void select(const Rows& rows, const Ranking& ranking, const std::vector<Large>& large, void* workspace,
            const Queue& queue) {
    with_keys(rows.dtype, ranking.based, [&](auto key, auto stored) {
        using Key = decltype(key);
        using S = decltype(stored);
        if (!ranking.whole)
            launch("isthmus select: small groups", small_kernel<Key, S>, ranking.groups * ranking.models, queue, rows,
                   ranking);
        for_batches<Key>(rows, ranking, large, workspace,
                         [&](const Batch<Key>& batch, std::int64_t* open) { run<Key, S>(rows, batch, open, queue); });
    });
}

}  // namespace isthmus::cuda
