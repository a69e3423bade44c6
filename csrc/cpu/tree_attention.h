// Attention of tree nodes over a paged prefix and their own ancestors.
#pragma once

#include <cstdint>

#include "linear.h"

namespace eagle {

struct TreeAttentionArgs {
    const float* q;             // [batch, queries, q_heads, head_dim]
    const void* kv_cache;       // [2, pages, page_size, kv_heads, head_dim], strides below
    const int32_t* page_table;  // [batch, max_pages]
    const int32_t* seq_lens;    // [batch]
    const int64_t* mask;        // [batch, queries, mask_words] or null: causal
    float* out;                 // [batch, queries, q_heads, head_dim]
    float* lse;                 // [batch, queries, q_heads] natural log, or null
    int64_t batch, queries, q_heads, kv_heads, head_dim, page_size, max_pages, mask_words, window;
    int64_t q_strides[3], out_strides[3];  // batch, query, head
    int64_t kv_strides[4];                 // K or V, page, slot, head
    float scale, soft_cap;
    Dtype cache_dtype;
    int threads;
};

}  // namespace eagle
