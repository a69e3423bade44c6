#include "accept.h"

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
        int64_t node = 0, depth = 0;
        accepted[0] = 0;
        // Children come after their parent, so one pass upwards finds each next node.
        for (int64_t child = 1; child < a.nodes && depth < a.max_depth; ++child) {
            if (parent[child] != node || tokens[child] < 0 || tokens[child] != sampled[node]) continue;
            accepted[++depth] = static_cast<int32_t>(child);
            node = child;
        }
        a.num_accepted[b] = static_cast<int32_t>(depth);
        a.bonus_token[b] = sampled[node];
    }
}

}  // namespace eagle
