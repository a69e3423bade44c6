// One level of the draft tree.
#pragma once

#include <cstdint>

namespace eagle {

constexpr int kMaxTopK = 64;  // children per node, of expand and of draw_children

struct ExpandArgs {
    const float* logits;              // [batch, frontier, vocab], strides below
    const float* frontier_scores;     // [batch, frontier]
    const int32_t* frontier_pool;     // [batch, frontier]
    const float* features;            // [batch, frontier, hidden]
    const int64_t* frontier_mask;     // [batch, frontier, mask_words]
    const int64_t* draft_to_target;   // [vocab] or null
    const int32_t* choices;           // [next_size] or null
    int64_t* pool_tokens;             // [batch, pool]
    float* pool_scores;               // [batch, pool]
    int32_t* pool_parents;            // [batch, pool]
    int64_t* tokens;                  // [batch, next_size]
    float* scores;                    // [batch, next_size]
    int32_t* pool_index;              // [batch, next_size]
    float* next_features;             // [batch, next_size, hidden]
    int64_t* next_mask;               // [batch, next_size, mask_words]
    int64_t batch, frontier, vocab, hidden, mask_words, pool, pool_offset, top_k, first_row, next_size;
    int64_t logits_strides[2], feature_strides[2];
    int threads;
};

}  // namespace eagle
