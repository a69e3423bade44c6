#include "advance.h"

#include <algorithm>
#include <cstring>

namespace eagle {

void advance(const AdvanceArgs& a) {
    for (int64_t b = 0; b < a.batch; ++b) {
        if (!a.active[b]) continue;
        if (a.num_missed) {
            const int64_t pending = a.num_pending[b], first = a.num_missed[b], room = a.most_missed - first, kept = std::max<int64_t>(0, std::min({pending, a.width, room}));
            std::memcpy(a.missed_tokens + b * a.most_missed + first, a.pending_tokens + b * a.width, kept * sizeof(int64_t));
            std::memcpy(a.missed_features + (b * a.most_missed + first) * a.feature_bytes, a.pending_features + b * a.width * a.feature_bytes, kept * a.feature_bytes);
            a.num_missed[b] += pending;
        }
        const int64_t* tokens = a.tokens + b * a.nodes;
        const int32_t* path = a.accepted_nodes + b * a.width;
        const int64_t last = a.num_accepted[b];
        for (int64_t i = 0; i < a.width; ++i) {
            const int64_t node = std::max(path[i], 0);
            a.pending_tokens[b * a.width + i] = i < last ? tokens[std::max(path[i + 1], 0)] : i == last ? a.bonus_token[b] : tokens[0];
            std::memcpy(a.pending_features + (b * a.width + i) * a.feature_bytes, a.features + (b * a.nodes + node) * a.feature_bytes, a.feature_bytes);
        }
        a.num_pending[b] = last + 1;
        a.root_tokens[b] = a.bonus_token[b];
        a.seq_lens[b] += static_cast<int32_t>(last) + 1;
    }
}

}  // namespace eagle
