// One token per row of logits, or the filtered distribution.
#pragma once

#include <cstdint>

namespace eagle {

struct SampleArgs {
    const float* logits;         // [rows, vocab], row stride logits_stride
    const float* temperature;    // [rows]; 0 = greedy
    const int32_t* top_k;        // [rows]; 0 = off
    const float* top_p;          // [rows]; 1 = off
    const float* min_p;          // [rows]; 0 = off
    const int64_t* seeds;        // [rows]
    const int64_t* positions;    // [rows]
    const float* logit_bias;             // [rows, vocab] or null
    const float* repetition_penalty;     // [rows] or null
    const float* presence_penalty;       // [rows] or null
    const float* frequency_penalty;      // [rows] or null
    const bool* prompt_mask;             // [rows, vocab] or null
    const int32_t* output_counts;        // [rows, vocab] or null
    int64_t* tokens;     // [rows], or null when probabilities are wanted
    float* log_probs;    // [rows] or null
    float* probs;        // [rows, vocab] or null
    int64_t* children;   // [rows, count] or null: draws without replacement; row r uses noise stream 1 + 16 * (r % lanes)
    int64_t count, lanes;
    int64_t rows, vocab, logits_stride;
    bool min_p_first;    // order "vllm": min_p, top_k, top_p; else "hf": top_k, top_p, min_p
    int threads;
};

}  // namespace eagle
