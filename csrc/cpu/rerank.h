// The draft pool's best nodes as a tree.
#pragma once

#include <cstdint>

namespace eagle {

struct RerankArgs {
    const int64_t* pool_tokens;   // [batch, pool]
    const float* pool_scores;     // [batch, pool]
    const int32_t* pool_parents;  // [batch, pool]; -1: child of the root
    const int64_t* root_tokens;   // [batch]
    const int32_t* seq_lens;      // [batch]
    const int32_t* choices;       // [nodes - 1] ascending pool indices, or null
    int64_t* tokens;              // [batch, nodes]
    int32_t* parent;              // [batch, nodes]
    int32_t* depth;               // [batch, nodes]
    int64_t* mask;                // [batch, nodes, mask_words]
    int64_t* position_ids;        // [batch, nodes]
    int64_t batch, pool, nodes, mask_words;
};

// Returns the pool index of a selected node whose parent was not selected, or -1. A pool written by expand has none: a child never outranks its parent.
int64_t rerank(const RerankArgs& args);

}  // namespace eagle
