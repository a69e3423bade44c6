// One level of the draft tree, from the best keys of each vocabulary tile instead of from logits.
#pragma once

#include <cstdint>

namespace eagle {

constexpr int64_t kMaxTiles = 4096;

// Every field is 8 bytes wide (the tests fill the struct as an array).
struct ExpandTopkArgs {
    const int64_t* keys;             // [batch, frontier, tiles, top_k], descending in each tile
    const float* max;                // [batch, frontier, tiles]
    const float* sum_exp;            // [batch, frontier, tiles]
    const float* frontier_scores;    // [batch, frontier]
    const int32_t* frontier_pool;    // [batch, frontier]
    const char* features;            // [batch, frontier, row_bytes], strides below
    const int64_t* frontier_mask;    // [batch, frontier, mask_words]
    const int64_t* draft_to_target;  // [draft_vocab] or null
    const int32_t* choices;          // [next_size] or null
    int64_t* pool_tokens;            // [batch, pool]
    float* pool_scores;              // [batch, pool]
    int32_t* pool_parents;           // [batch, pool]
    int64_t* tokens;                 // [batch, next_size]
    float* scores;                   // [batch, next_size]
    int32_t* pool_index;             // [batch, next_size]
    char* next_features;             // [batch, next_size, row_bytes]
    int64_t* next_mask;              // [batch, next_size, mask_words]
    const int32_t* seq_lens;         // [batch] or null
    int64_t* position_ids;           // [batch, next_size], seq_len + depth, or null
    int64_t depth;
    int64_t batch, frontier, tiles, draft_vocab, row_bytes, mask_words, pool, pool_offset, top_k, first_row, next_size;
    int64_t feature_strides[2];      // in bytes
};

void expand_topk(const ExpandTopkArgs& args);

}  // namespace eagle
