#include "rerank.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace eagle {

int64_t rerank(const RerankArgs& a) {
    std::vector<int32_t> order(a.pool), node_of(a.pool);
    for (int64_t b = 0; b < a.batch; ++b) {
        const float* scores = a.pool_scores + b * a.pool;
        const auto score = [scores](int32_t i) { return std::isnan(scores[i]) ? -INFINITY : scores[i]; };
        if (a.choices) {
            std::copy(a.choices, a.choices + a.nodes - 1, order.begin());
        } else {
            for (int64_t i = 0; i < a.pool; ++i) order[i] = static_cast<int32_t>(i);
            std::partial_sort(order.begin(), order.begin() + a.nodes - 1, order.end(),
                              [&](int32_t x, int32_t y) { return score(x) > score(y) || (score(x) == score(y) && x < y); });
            std::sort(order.begin(), order.begin() + a.nodes - 1);
        }
        std::fill(node_of.begin(), node_of.end(), -1);
        int64_t* tokens = a.tokens + b * a.nodes;
        int32_t* parent = a.parent + b * a.nodes;
        int32_t* depth = a.depth + b * a.nodes;
        int64_t* mask = a.mask + b * a.nodes * a.mask_words;
        std::fill(mask, mask + a.nodes * a.mask_words, 0);
        for (int64_t node = 0; node < a.nodes; ++node) {
            if (node == 0) {
                tokens[0] = a.root_tokens[b];
                parent[0] = -1;
                depth[0] = 0;
            } else {
                const int32_t index = order[node - 1];
                const int32_t pool_parent = a.pool_parents[b * a.pool + index];
                const int32_t up = pool_parent < 0 ? 0 : node_of[pool_parent];
                if (up < 0) return index;
                node_of[index] = static_cast<int32_t>(node);
                tokens[node] = a.pool_tokens[b * a.pool + index];
                parent[node] = up;
                depth[node] = depth[up] + 1;
                std::copy(mask + up * a.mask_words, mask + (up + 1) * a.mask_words, mask + node * a.mask_words);
            }
            mask[node * a.mask_words + node / 64] |= static_cast<int64_t>(uint64_t{1} << (node % 64));
            a.position_ids[b * a.nodes + node] = static_cast<int64_t>(a.seq_lens[b]) + depth[node];
        }
    }
    return -1;
}

}  // namespace eagle
