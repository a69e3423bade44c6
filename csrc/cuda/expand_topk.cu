#include "expand_topk.h"

#include "../fp32_math.h"
#include "device.h"

namespace eagle::cuda {

constexpr int kMaxExpandWarps = 16;

// log(sum of sum_exp[t] exp(max[t] - greatest)) + greatest over the tiles of a row, by the fixed operations of the rule: the warp's lanes hold 256 sums, eight each.
__device__ static float log_sum_exp(const float* max, const float* sum_exp, int tiles, float greatest) {
    float sums[8] = {};
    for (int first = 0; first < tiles; first += 256) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int t = first + 32 * i + lane_id();
            if (t < tiles) sums[i] = fmaf(sum_exp[t], fp32_exp(max[t] - greatest), sums[i]);
        }
    }
#pragma unroll
    for (int width = 4; width > 0; width /= 2)
#pragma unroll
        for (int i = 0; i < width; ++i) sums[i] = sums[i] + sums[i + width];
    float sum = sums[0];
    for (int width = 16; width > 0; width /= 2) sum = sum + __shfl_down_sync(kFullMask, sum, width);
    return greatest + fp32_log(__shfl_sync(kFullMask, sum, 0));
}

// Key of (max descending, tile ascending) of the best of this lane's tiles: every 32nd, eight at a time so that eight loads are in flight. kPaddingKey when it has none.
__device__ static int64_t best_tile_of_lane(const float* max, int tiles) {
    float greatest = -INFINITY;
    int tile = lane_id();
    for (int first = lane_id(); first < tiles; first += 256) {
        float maxima[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) maxima[i] = first + 32 * i < tiles ? max[first + 32 * i] : -INFINITY;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (maxima[i] > greatest) greatest = maxima[i], tile = first + 32 * i;
    }
    return tile < tiles ? ordered_key(greatest, static_cast<uint32_t>(tile)) : kPaddingKey;
}

// The top_k best keys of a row, descending: the r-th to lane r % 32, in first (r < 32) or second. They lie in the top_k tiles with the greatest maxima (a tile's first key has its maximum,
// and of two tiles the earlier one has the smaller ids), so only the maxima of the other tiles are read: 8 kB a row for 2000 tiles, where their first keys would be 64 kB of sectors.
// A lane minds every 32nd tile; when its best one is taken, all lanes together look for its next. Then the lists of the chosen tiles are merged, at most two a lane.
__device__ static void best_keys(const int64_t* keys, const float* max, int tiles, int top_k, int64_t mine, int64_t& first, int64_t& second) {
    const int lane = lane_id();
    int64_t list_a = kPaddingKey, list_b = kPaddingKey;  // this lane's tiles
    for (int r = 0; r < top_k; ++r) {
        const int64_t best = warp_max(mine);
        if (best == kPaddingKey) break;  // fewer tiles than top_k
        if (r == lane) list_a = best;
        if (r == lane + 32) list_b = best;
        const int owner = static_cast<int>(index_of_key(best) % 32);
        int64_t next = kPaddingKey;  // tile keys differ, so "less than the one taken" means "not yet taken"
        for (int t = owner + 32 * lane; t < tiles; t += 32 * 32) {
            const int64_t key = ordered_key(max[t], static_cast<uint32_t>(t));
            if (key < best && key > next) next = key;
        }
        next = warp_max(next);
        if (lane == owner) mine = next;
    }
    const auto list_of = [&](int64_t tile_key) { return tile_key == kPaddingKey ? nullptr : keys + static_cast<int64_t>(index_of_key(tile_key)) * top_k; };
    const int64_t *left_a = list_of(list_a), *left_b = list_of(list_b);
    int64_t head_a = left_a != nullptr ? *left_a : kPaddingKey, head_b = left_b != nullptr ? *left_b : kPaddingKey;
    int place_a = 0, place_b = 0;
    first = second = kPaddingKey;
    for (int r = 0; r < top_k; ++r) {
        const int64_t best = warp_max(head_a > head_b ? head_a : head_b);
        if (r == lane) first = best;
        if (r == lane + 32) second = best;
        if (best == kPaddingKey) break;
        if (head_a == best) head_a = ++place_a < top_k ? *++left_a : kPaddingKey;
        else if (head_b == best) head_b = ++place_b < top_k ? *++left_b : kPaddingKey;
    }
}

// How many of `count` descending keys are greater than `key`.
__device__ static int count_greater(const int64_t* descending, int count, int64_t key) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (descending[middle] > key) low = middle + 1;
        else high = middle;
    }
    return low;
}

// One warp copies a row in the widest vectors that both addresses and the length allow; eight loads, then eight stores, since a load behind a store that may overlap waits for it.
template <typename Vector>
__device__ static void copy_row_as(char* to, const char* from, int64_t bytes) {
    const int count = static_cast<int>(bytes / static_cast<int64_t>(sizeof(Vector)));
    for (int first = lane_id(); first < count; first += 256) {
        Vector batch[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (first + 32 * i < count) batch[i] = reinterpret_cast<const Vector*>(from)[first + 32 * i];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (first + 32 * i < count) reinterpret_cast<Vector*>(to)[first + 32 * i] = batch[i];
    }
}
__device__ static void copy_row(char* to, const char* from, int64_t bytes) {
    const uint64_t alignment = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
    if (alignment % 16 == 0) copy_row_as<uint4>(to, from, bytes);
    else if (alignment % 4 == 0) copy_row_as<uint32_t>(to, from, bytes);
    else copy_row_as<uint16_t>(to, from, bytes);
}

// One block per sequence; grid = batch, warps = frontier or next_size, 4 to 16. A warp per frontier node finds its children and writes them to the pool; then, since the children of a
// node stand in descending order, each candidate's rank is its own place plus one binary search per other node; then a warp per chosen node writes the next frontier.
// Assumes even row_bytes; clamps choices; an id outside draft_to_target and a padding key give token -1.
__global__ void __launch_bounds__(32 * kMaxExpandWarps) expand_topk_kernel(const ExpandTopkArgs a) {
    const int64_t b = blockIdx.x;
    const int lane = lane_id(), top_k = static_cast<int>(a.top_k), tiles = static_cast<int>(a.tiles), frontier = static_cast<int>(a.frontier), candidates = frontier * top_k;
    const int next_size = static_cast<int>(a.next_size);
    int64_t* score_keys = reinterpret_cast<int64_t*>(shared_memory());  // [frontier, top_k]
    int64_t* tokens = score_keys + candidates;                          // [frontier, top_k]
    float* scores = reinterpret_cast<float*>(tokens + candidates);      // [frontier, top_k]
    int* chosen = reinterpret_cast<int*>(scores + candidates);          // [next_size]
    const int64_t pool_base = b * a.pool + a.pool_offset;

    for (int f = warp_id(); f < frontier; f += num_warps()) {
        const int64_t row = b * a.frontier + f;
        const float *max = a.max + row * a.tiles, *sum_exp = a.sum_exp + row * a.tiles;  // [tiles]
        const int64_t best_tile = best_tile_of_lane(max, tiles);
        const float greatest = value_of_key(warp_max(best_tile));
        const float row_log_sum_exp = greatest > -INFINITY && greatest < INFINITY ? log_sum_exp(max, sum_exp, tiles, greatest) : 0.0f;
        int64_t best[2];
        best_keys(a.keys + row * a.tiles * a.top_k, max, tiles, top_k, best_tile, best[0], best[1]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = lane + 32 * half;
            if (r >= top_k) continue;
            const bool exists = best[half] != kPaddingKey;
            const uint32_t id = index_of_key(best[half]);
            int64_t token = exists ? static_cast<int64_t>(id) : -1;
            if (exists && a.draft_to_target != nullptr) token = id < a.draft_vocab ? a.draft_to_target[id] : -1;
            const float score = child_score(a.frontier_scores[row], exists ? value_of_key(best[half]) : -INFINITY, greatest, row_log_sum_exp);
            const int candidate = f * top_k + r;
            score_keys[candidate] = ordered_key(score, static_cast<uint32_t>(candidate));
            tokens[candidate] = token;
            scores[candidate] = score;
            a.pool_tokens[pool_base + candidate] = token;
            a.pool_scores[pool_base + candidate] = score;
            a.pool_parents[pool_base + candidate] = a.frontier_pool[row];
        }
    }
    __syncthreads();

    if (a.choices != nullptr) {
        for (int j = static_cast<int>(threadIdx.x); j < next_size; j += static_cast<int>(blockDim.x)) {
            const int choice = a.choices[j];
            chosen[j] = choice < 0 ? 0 : choice < candidates ? choice : candidates - 1;
        }
    } else if (next_size > 0) {
        for (int c = static_cast<int>(threadIdx.x); c < candidates; c += static_cast<int>(blockDim.x)) {
            const int node = c / top_k;
            int rank = c % top_k;
            for (int f = 0; f < frontier; ++f)
                if (f != node) rank += count_greater(score_keys + f * top_k, top_k, score_keys[c]);
            if (rank < next_size) chosen[rank] = c;
        }
    }
    __syncthreads();

    for (int j = warp_id(); j < next_size; j += num_warps()) {
        const int candidate = chosen[j], f = candidate / top_k;
        const int64_t out = b * a.next_size + j, bit = a.first_row + j;
        if (lane == 0) {
            a.tokens[out] = tokens[candidate];
            a.scores[out] = scores[candidate];
            a.pool_index[out] = static_cast<int32_t>(a.pool_offset) + candidate;
            if (a.position_ids != nullptr) a.position_ids[out] = a.seq_lens[b] + a.depth;
        }
        for (int64_t w = lane; w < a.mask_words; w += 32) {
            const uint64_t own = w == bit / 64 ? uint64_t{1} << (bit % 64) : 0;
            a.next_mask[out * a.mask_words + w] = static_cast<int64_t>(static_cast<uint64_t>(a.frontier_mask[(b * a.frontier + f) * a.mask_words + w]) | own);
        }
        copy_row(a.next_features + out * a.row_bytes, a.features + b * a.feature_strides[0] + f * a.feature_strides[1], a.row_bytes);
    }
}

cudaError_t expand_topk(const ExpandTopkArgs& args, cudaStream_t stream) {
    if (args.frontier > kMaxFrontier || args.top_k > kMaxFrontier || args.tiles > kMaxTiles || args.row_bytes % 2 != 0) return cudaErrorInvalidValue;
    if (args.batch == 0 || args.frontier == 0) return cudaSuccess;
    const int64_t widest = args.frontier > args.next_size ? args.frontier : args.next_size;
    const int64_t warps = widest < 4 ? 4 : widest < kMaxExpandWarps ? widest : kMaxExpandWarps;
    return launch(expand_topk_kernel, args.batch, static_cast<int>(32 * warps), 20 * args.frontier * args.top_k + 4 * args.next_size, stream, args);
}

}  // namespace eagle::cuda
