#include "accept.h"

#include <algorithm>

namespace eagle {

void accept(const AcceptArgs& a) {
    for (int64_t b = 0; b < a.batch; ++b) {
        int32_t* accepted = a.accepted_nodes + b * (a.max_depth + 1);
        for (int64_t i = 0; i <= a.max_depth; ++i) accepted[i] = -1;
        a.num_accepted[b] = 0;
        a.bonus_token[b] = -1;
        if (!a.active[b]) continue;
        const int64_t* tokens = a.tokens + b * a.nodes;
        const int32_t* parent = a.parent + b * a.nodes;
        const int64_t* sampled = a.sampled + b * a.nodes;
        const int64_t* stop_tokens = a.stop_token_ids + b * a.num_stop_tokens;
        const auto stops = [&](int64_t token) { return a.stop_token_ids != nullptr && token >= 0 && std::find(stop_tokens, stop_tokens + a.num_stop_tokens, token) != stop_tokens + a.num_stop_tokens; };
        int64_t node = 0, depth = 0;
        bool stopped = stops(sampled[0]);
        accepted[0] = 0;
        // Children come after their parent, so one pass upwards finds each next node.
        for (int64_t child = 1; child < a.nodes && depth < a.max_depth && !stopped; ++child) {
            if (parent[child] != node || tokens[child] < 0 || tokens[child] != sampled[node]) continue;
            accepted[++depth] = static_cast<int32_t>(child);
            node = child;
            stopped = stops(sampled[node]);
        }
        a.num_accepted[b] = static_cast<int32_t>(depth);
        a.bonus_token[b] = sampled[node];
        if (stopped) a.active[b] = false;
        if (a.output_ring == nullptr) continue;
        // The tokens emitted are those drawn after the nodes of the path. Unsigned, so that no counter leads outside the ring.
        int64_t* ring = a.output_ring + b * (a.ring_size + 1);
        const uint64_t emitted = static_cast<uint64_t>(ring[a.ring_size]), size = static_cast<uint64_t>(a.ring_size);
        for (int64_t i = 0; i <= depth; ++i) ring[(emitted + static_cast<uint64_t>(i)) % size] = sampled[accepted[i]];
        ring[a.ring_size] = static_cast<int64_t>(emitted + static_cast<uint64_t>(depth) + 1);
    }
}

}  // namespace eagle
