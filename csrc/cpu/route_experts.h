// Softmax over the experts and the top_k of them, renormalised.
#pragma once

#include <cstdint>

namespace eagle {

struct RouteExpertsArgs {
    const float* logits;  // [rows, experts] contiguous
    float* weights;       // [rows, top_k]
    int32_t* expert_ids;  // [rows, top_k]
    int64_t rows, experts, top_k;
    bool normalize;
};

}  // namespace eagle
