// Counter-based Gumbel and uniform noise.
#pragma once

#include <cstdint>

namespace eagle {

struct NoiseArgs {
    const int64_t* seeds;      // [rows]
    const int64_t* positions;  // [rows]
    float* out;                // [rows, count]
    int64_t rows, count;
    uint32_t stream;
    bool uniform;
};

// The walk of accept_rejection; here because its coins and its residual draw are this noise.
struct AcceptRejectionArgs {
    const int64_t* tokens;      // [batch, nodes]
    const int32_t* parent;      // [batch, nodes]
    const float* target_probs;  // [batch, nodes, vocab]
    const float* draft_probs;   // [batch, nodes, vocab]
    const int64_t* seeds;       // [batch]
    const int64_t* positions;   // [batch]
    const bool* active;         // [batch]
    int32_t* accepted_nodes;    // [batch, max_depth + 1]
    int32_t* num_accepted;      // [batch]
    int64_t* bonus_token;       // [batch]
    int64_t batch, nodes, vocab, max_depth;
};

}  // namespace eagle
