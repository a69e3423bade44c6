// Rotary embedding of q (in place) and k, and the store of k and v into the paged cache.
#pragma once

#include <cstdint>

#include "linear.h"

namespace eagle {

struct RopeStoreKvArgs {
    float* q;                    // [batch, queries, q_heads, head_dim]; rotated in place
    const float* k;              // [batch, queries, kv_heads, head_dim]
    const float* v;              // as k
    const int64_t* position_ids; // [batch, queries]
    const float* rope_table;     // [max_positions, head_dim]: cos of half the dimensions, then sin
    void* kv_cache;              // [2, pages, page_size, kv_heads, head_dim] contiguous
    const int32_t* page_table;   // [batch, max_pages]
    const int32_t* seq_lens;     // [batch]
    int64_t batch, queries, q_heads, kv_heads, head_dim, max_positions, pages, page_size, max_pages, row_offset;
    int64_t q_strides[3], k_strides[3], v_strides[3];  // batch, query, head
    Dtype cache_dtype;
    int threads;
};

}  // namespace eagle
