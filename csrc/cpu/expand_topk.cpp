#include "expand_topk.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../fp32_math.h"

namespace eagle {

namespace {

struct RowStatistics {
    float greatest, log_sum_exp;
};

RowStatistics row_statistics(const float* max, const float* sum_exp, int64_t tiles) {
    float greatest = -INFINITY;
    for (int64_t t = 0; t < tiles; ++t) greatest = max[t] > greatest ? max[t] : greatest;
    if (greatest == -INFINITY || greatest == INFINITY) return {greatest, 0.0f};
    float sums[256] = {};
    for (int64_t t = 0; t < tiles; ++t) sums[t % 256] = fmaf(sum_exp[t], fp32_exp(max[t] - greatest), sums[t % 256]);
    for (int width = 128; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) sums[j] = sums[j] + sums[j + width];
    return {greatest, greatest + fp32_log(sums[0])};
}

// The children of frontier node f into the pool; keys of their scores into `candidates`.
void expand_node(const ExpandTopkArgs& a, int64_t b, int64_t f, std::vector<int64_t>& next_of_tile, int64_t* candidates) {
    const int64_t row = b * a.frontier + f, base = b * a.pool + a.pool_offset + f * a.top_k;
    const int64_t* keys = a.keys + row * a.tiles * a.top_k;
    const RowStatistics statistics = row_statistics(a.max + row * a.tiles, a.sum_exp + row * a.tiles, a.tiles);
    std::fill(next_of_tile.begin(), next_of_tile.end(), 0);
    for (int64_t r = 0; r < a.top_k; ++r) {
        int64_t best = kPaddingKey, best_tile = -1;
        for (int64_t t = 0; t < a.tiles; ++t) {
            if (next_of_tile[t] >= a.top_k) continue;
            const int64_t key = keys[t * a.top_k + next_of_tile[t]];
            if (key > best) best = key, best_tile = t;
        }
        int64_t token = -1;
        float logit = -INFINITY;
        if (best_tile >= 0) {
            ++next_of_tile[best_tile];
            const uint32_t id = index_of_key(best);
            token = a.draft_to_target == nullptr ? id : id < a.draft_vocab ? a.draft_to_target[id] : -1;
            logit = value_of_key(best);
        }
        a.pool_tokens[base + r] = token;
        a.pool_scores[base + r] = child_score(a.frontier_scores[row], logit, statistics.greatest, statistics.log_sum_exp);
        a.pool_parents[base + r] = a.frontier_pool[row];
        candidates[f * a.top_k + r] = ordered_key(a.pool_scores[base + r], static_cast<uint32_t>(f * a.top_k + r));
    }
}

}  // namespace

void expand_topk(const ExpandTopkArgs& a) {
    std::vector<int64_t> next_of_tile(a.tiles), candidates(a.frontier * a.top_k);
    for (int64_t b = 0; b < a.batch; ++b) {
        for (int64_t f = 0; f < a.frontier; ++f) expand_node(a, b, f, next_of_tile, candidates.data());
        if (a.choices == nullptr) std::partial_sort(candidates.begin(), candidates.begin() + a.next_size, candidates.end(), [](int64_t x, int64_t y) { return x > y; });
        const int64_t base = b * a.pool + a.pool_offset;
        for (int64_t j = 0; j < a.next_size; ++j) {
            const int64_t chosen = a.choices != nullptr ? a.choices[j] : index_of_key(candidates[j]);
            const int64_t parent = chosen / a.top_k, out = b * a.next_size + j, bit = a.first_row + j;
            a.tokens[out] = a.pool_tokens[base + chosen];
            a.scores[out] = a.pool_scores[base + chosen];
            a.pool_index[out] = static_cast<int32_t>(a.pool_offset + chosen);
            if (a.position_ids != nullptr) a.position_ids[out] = a.seq_lens[b] + a.depth;
            std::memcpy(a.next_features + out * a.row_bytes, a.features + b * a.feature_strides[0] + parent * a.feature_strides[1], a.row_bytes);
            for (int64_t w = 0; w < a.mask_words; ++w) a.next_mask[out * a.mask_words + w] = a.frontier_mask[(b * a.frontier + parent) * a.mask_words + w];
            a.next_mask[out * a.mask_words + bit / 64] |= static_cast<int64_t>(uint64_t{1} << (bit % 64));
        }
    }
}

}  // namespace eagle
