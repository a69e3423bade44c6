// The walk down the tree along the tokens that the target drew.
#pragma once

#include <cstdint>

namespace eagle {

struct AcceptArgs {
    const int64_t* tokens;    // [batch, nodes]
    const int32_t* parent;    // [batch, nodes]
    const int64_t* sampled;   // [batch, nodes]: the token drawn after each node
    const bool* active;       // [batch]
    int32_t* accepted_nodes;  // [batch, max_depth + 1]
    int32_t* num_accepted;    // [batch]
    int64_t* bonus_token;     // [batch]
    int64_t batch, nodes, max_depth;
};

void accept(const AcceptArgs& args);

}  // namespace eagle
