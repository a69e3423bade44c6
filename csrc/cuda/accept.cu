#include "accept.h"

#include "device.h"

namespace eagle::cuda {

__device__ static bool in_warp(const int64_t* list, int64_t size, int64_t value) {
    bool found = false;
    for (int64_t i = lane_id(); i < size; i += 32) found |= list[i] == value;
    return __any_sync(kFullMask, found);
}

// One warp, one block, per sequence; grid = batch. A lane looks at one node of 32 at a time; a ballot finds the children of the current node that carry the token drawn
// there. Assumes parent[i] < i: then the walk only goes upwards and each node is read once, ceil(nodes / 32) loads and max_depth ballots in all.
__global__ void __launch_bounds__(32) accept_kernel(const AcceptArgs a) {
    const int64_t b = blockIdx.x;
    const int lane = lane_id();
    int32_t* accepted = a.accepted_nodes + b * (a.max_depth + 1);
    const bool active = a.active[b];
    for (int64_t i = lane; i <= a.max_depth; i += 32) accepted[i] = -1;
    if (!active) {
        if (lane == 0) a.num_accepted[b] = 0, a.bonus_token[b] = -1;
        return;
    }

    const int64_t* tokens = a.tokens + b * a.nodes;
    const int32_t* parent = a.parent + b * a.nodes;
    const int64_t* sampled = a.sampled + b * a.nodes;
    int64_t* ring = a.output_ring == nullptr ? nullptr : a.output_ring + b * (a.ring_size + 1);
    const uint64_t emitted = ring == nullptr ? 0 : static_cast<uint64_t>(ring[a.ring_size]);
    const int64_t column = ring == nullptr ? 0 : static_cast<int64_t>(emitted % static_cast<uint64_t>(a.ring_size));  // unsigned, so that no counter leads outside the ring
    // From here on lane 0 writes: the path over what other lanes cleared, and `active` and the counter, which they have read.
    __syncwarp();

    int64_t node = 0, depth = 0, drawn = sampled[0];
    bool stopped = false;
    // The token drawn after a node of the path is emitted; true when the walk ends with it.
    const auto arrive = [&]() {
        if (lane == 0) {
            accepted[depth] = static_cast<int32_t>(node);
            if (ring != nullptr) ring[column + depth < a.ring_size ? column + depth : column + depth - a.ring_size] = drawn;
        }
        stopped = drawn >= 0 && in_warp(a.stop_token_ids + b * a.num_stop_tokens, a.num_stop_tokens, drawn);
        return stopped || depth == a.max_depth;
    };
    bool done = arrive();
    for (int64_t first = 0; first < a.nodes && !done; first += 32) {
        const int64_t mine = first + lane;
        const bool exists = mine > 0 && mine < a.nodes;
        const int64_t my_parent = exists ? parent[mine] : -1, my_token = exists ? tokens[mine] : -1, my_sampled = exists ? sampled[mine] : -1;
        while (!done) {
            const unsigned children = __ballot_sync(kFullMask, my_token >= 0 && my_token == drawn && my_parent == node && mine > node);
            if (children == 0) break;
            const int child = __ffs(static_cast<int>(children)) - 1;  // the smallest index wins
            node = first + child;
            drawn = __shfl_sync(kFullMask, my_sampled, child);
            ++depth;
            done = arrive();
        }
    }
    if (lane == 0) {
        a.num_accepted[b] = static_cast<int32_t>(depth);
        a.bonus_token[b] = drawn;
        if (stopped) a.active[b] = false;
        if (ring != nullptr) ring[a.ring_size] = static_cast<int64_t>(emitted + static_cast<uint64_t>(depth) + 1);
    }
}

cudaError_t accept(const AcceptArgs& args, cudaStream_t stream) {
    if (args.batch == 0) return cudaSuccess;
    return launch(accept_kernel, args.batch, 32, 0, stream, args);
}

}  // namespace eagle::cuda
