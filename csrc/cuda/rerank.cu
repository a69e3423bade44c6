#include "rerank.h"

#include "../fp32_math.h"
#include "device.h"

namespace eagle::cuda {

constexpr int kRerankThreads = 512;  // sixteen warps: one per value of the four bits that a round of the search fixes
constexpr int kRerankWarps = kRerankThreads / 32;
constexpr int kMaxWords = static_cast<int>(kMaxRerankNodes / 64);

__device__ static uint32_t unsigned_key(float score) { return static_cast<uint32_t>(ordered(score)) ^ 0x80000000u; }

// The greatest threshold that at least `count` keys reach, by eight rounds of four bits; count >= 1. Warp w counts the keys that reach the threshold with w in these bits.
// A round costs pool / 32 reads of shared memory per lane and two barriers; ranking each key against all others would cost pool^2 / 512 reads per thread.
__device__ static uint32_t find_threshold(const uint32_t* keys, int64_t pool, int64_t count, int* counts) {
    uint32_t threshold = 0;
    for (int shift = 28; shift >= 0; shift -= 4) {
        const uint32_t mine = threshold | (static_cast<uint32_t>(warp_id()) << shift);
        int reach = 0;
        for (int64_t i = lane_id(); i < pool; i += 32) reach += keys[i] >= mine;
        reach = __reduce_add_sync(kFullMask, reach);
        if (lane_id() == 0) counts[warp_id()] = reach;
        __syncthreads();
        int digit = 0;  // digit 0 is always reached: it is the threshold so far
        for (int w = 1; w < kRerankWarps; ++w)
            if (counts[w] >= count) digit = w;
        threshold |= static_cast<uint32_t>(digit) << shift;
        __syncthreads();  // counts have been read
    }
    return threshold;
}

// The `count` best pool indices, ascending, into chosen: those above the threshold and the first of those at it, by prefix sums over blocks of 512.
__device__ static void choose(const uint32_t* keys, int64_t pool, int count, int* counts, int32_t* chosen) {
    const uint32_t threshold = find_threshold(keys, pool, count, counts);
    // How many are above it decides how many of those at it are chosen.
    int above = 0;
    for (int64_t i = lane_id(); i < pool; i += 32) above += keys[i] > threshold;
    const int room_at = count - __reduce_add_sync(kFullMask, above);
    const unsigned before = (1u << lane_id()) - 1;
    int above_so_far = 0, at_so_far = 0;
    for (int64_t first = 0; first < pool; first += kRerankThreads) {
        const int64_t i = first + threadIdx.x;
        const bool is_above = i < pool && keys[i] > threshold, is_at = i < pool && keys[i] == threshold;
        const unsigned warp_above = __ballot_sync(kFullMask, is_above), warp_at = __ballot_sync(kFullMask, is_at);
        if (lane_id() == 0) counts[warp_id()] = __popc(warp_above) | (__popc(warp_at) << 16);
        __syncthreads();
        int packed = 0, total = 0;
        for (int w = 0; w < kRerankWarps; ++w) {
            if (w < warp_id()) packed += counts[w];
            total += counts[w];
        }
        const int rank_above = above_so_far + (packed & 0xFFFF) + __popc(warp_above & before), rank_at = at_so_far + (packed >> 16) + __popc(warp_at & before);
        if (is_above) chosen[rank_above + (rank_at < room_at ? rank_at : room_at)] = static_cast<int32_t>(i);
        if (is_at && rank_at < room_at) chosen[rank_above + rank_at] = static_cast<int32_t>(i);
        above_so_far += total & 0xFFFF;
        at_so_far += total >> 16;
        __syncthreads();  // counts have been read, chosen has been written
    }
}

// Place of `value` among `count` ascending numbers, or -1.
__device__ static int place_of(const int32_t* ascending, int count, int32_t value) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (ascending[middle] < value) low = middle + 1;
        else high = middle;
    }
    return low < count && ascending[low] == value ? low : -1;
}

// One block per sequence; grid = batch. First the chosen pool indices, ascending; then a thread per node: its parent by binary search, depth and mask by pointer doubling in
// log2(depth) rounds. Assumes choices, where given, to ascend.
__global__ void __launch_bounds__(kRerankThreads) rerank_kernel(const RerankArgs a) {
    const int64_t b = blockIdx.x;
    const int nodes = static_cast<int>(a.nodes), words = static_cast<int>(a.mask_words);
    uint64_t* mask = reinterpret_cast<uint64_t*>(shared_memory());      // [nodes, words]
    int32_t* chosen = reinterpret_cast<int32_t*>(mask + nodes * words);  // [nodes - 1]
    int32_t* up = chosen + nodes - 1;                                    // [nodes]: the ancestor up to which, itself excluded, mask and depth count
    int32_t* depth = up + nodes;                                         // [nodes]
    int* counts = depth + nodes;                                         // [kRerankWarps]
    uint32_t* keys = reinterpret_cast<uint32_t*>(counts + kRerankWarps);  // [pool], absent with choices

    if (a.choices != nullptr) {
        for (int j = static_cast<int>(threadIdx.x); j < nodes - 1; j += kRerankThreads) chosen[j] = a.choices[j];
        __syncthreads();
    } else {
        const float* scores = a.pool_scores + b * a.pool;  // [pool]
        for (int64_t i = threadIdx.x; i < a.pool; i += kRerankThreads) keys[i] = unsigned_key(scores[i]);
        __syncthreads();
        if (nodes > 1) choose(keys, a.pool, nodes - 1, counts, chosen);
    }

    const int node = static_cast<int>(threadIdx.x);
    const bool mine = node < nodes;
    int my_parent = -1, my_up = 0, my_depth = 0;
    int64_t token = 0;
    uint64_t my_mask[kMaxWords] = {};
    if (mine) {
        if (node == 0) {
            token = a.root_tokens[b];
        } else {
            const int32_t index = chosen[node - 1];
            const bool valid = index >= 0 && index < a.pool;
            const int32_t pool_parent = valid ? a.pool_parents[b * a.pool + index] : -1;
            const int found = pool_parent < 0 ? -1 : place_of(chosen, node - 1, pool_parent);
            const bool orphan = !valid || (pool_parent >= 0 && found < 0);
            token = orphan ? -1 : a.pool_tokens[b * a.pool + index];
            my_parent = my_up = found + 1;
            my_depth = 1;
        }
        for (int w = 0; w < kMaxWords; ++w)
            if (w == node / 64) my_mask[w] = uint64_t{1} << (node % 64);
    }
    while (true) {
        if (mine) {
            up[node] = my_up;
            depth[node] = my_depth;
            for (int w = 0; w < kMaxWords; ++w)
                if (w < words) mask[node * words + w] = my_mask[w];
        }
        // Also the barrier between these writes and the reads below.
        if (!__syncthreads_or(my_up != 0)) break;
        if (my_up != 0) {
            my_depth += depth[my_up];
            for (int w = 0; w < kMaxWords; ++w)
                if (w < words) my_mask[w] |= mask[my_up * words + w];
            my_up = up[my_up];
        }
        __syncthreads();  // all have read before any writes again
    }
    if (!mine) return;
    my_mask[0] |= 1;  // the root is everyone's ancestor
    const int64_t out = b * nodes + node;
    a.tokens[out] = token;
    a.parent[out] = my_parent;
    a.depth[out] = my_depth;
    a.position_ids[out] = static_cast<int64_t>(a.seq_lens[b]) + my_depth;
    for (int w = 0; w < kMaxWords; ++w)
        if (w < words) a.mask[out * words + w] = static_cast<int64_t>(my_mask[w]);
}

cudaError_t rerank(const RerankArgs& args, cudaStream_t stream) {
    if (args.nodes > kMaxRerankNodes || args.nodes < 1 || (args.choices == nullptr && args.pool > kMaxRerankPool)) return cudaErrorInvalidValue;
    if (args.batch == 0) return cudaSuccess;
    const int64_t shared_bytes = args.nodes * (8 * args.mask_words + 12) - 4 + 4 * kRerankWarps + (args.choices == nullptr ? 4 * args.pool : 0);
    return launch(rerank_kernel, args.batch, kRerankThreads, shared_bytes, stream, args);
}

}  // namespace eagle::cuda
