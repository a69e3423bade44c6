// The walk down the tree along the tokens that the target drew.
#pragma once

#include <cstdint>

namespace eagle {

// Every field is 8 bytes wide (the tests fill the struct as an array).
struct AcceptArgs {
    const int64_t* tokens;          // [batch, nodes]
    const int32_t* parent;          // [batch, nodes]; parent[i] < i
    const int64_t* sampled;         // [batch, nodes]: the token drawn after each node
    bool* active;                   // [batch]; a row that draws a stop token becomes false
    const int64_t* stop_token_ids;  // [batch, num_stop_tokens], -1: none; or null
    int64_t* output_ring;           // [batch, ring_size + 1], last column: tokens emitted so far; or null
    int32_t* accepted_nodes;        // [batch, max_depth + 1]
    int32_t* num_accepted;          // [batch]
    int64_t* bonus_token;           // [batch]
    int64_t batch, nodes, max_depth, num_stop_tokens, ring_size;
};

void accept(const AcceptArgs& args);

}  // namespace eagle
