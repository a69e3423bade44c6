// The end of a step: what was accepted becomes the start of the next step.
#pragma once

#include <cstdint>

namespace eagle {

struct AdvanceArgs {
    const int64_t* tokens;          // [batch, nodes]
    const char* features;           // [batch, nodes, feature_bytes]
    const int32_t* accepted_nodes;  // [batch, width], root first, -1 after the end
    const int32_t* num_accepted;    // [batch]
    const int64_t* bonus_token;     // [batch]
    const bool* active;             // [batch]
    int32_t* seq_lens;              // [batch]
    int64_t* root_tokens;           // [batch]
    int64_t* num_pending;           // [batch]
    int64_t* pending_tokens;        // [batch, width]
    char* pending_features;         // [batch, width, feature_bytes]
    int64_t* num_missed;            // [batch], or null: nothing is kept
    int64_t* missed_tokens;         // [batch, most_missed]
    char* missed_features;          // [batch, most_missed, feature_bytes]
    int64_t batch, nodes, width, feature_bytes, most_missed;
};

void advance(const AdvanceArgs& args);

}  // namespace eagle
