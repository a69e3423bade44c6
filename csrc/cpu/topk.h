// Per row of logits: the top_k as sortable keys, and log-softmax statistics; of given logits, or of the product of features with a head.
#pragma once

#include <cstdint>

#include "linear.h"

namespace eagle {

// key = ordered(logit) << 32 | (0xFFFFFFFF - id), with the int32 bits i of (NaN ? -inf : logit + 0.0f) and ordered(i) = i ^ ((i >> 31) & 0x7FFFFFFF): as signed numbers keys
// ascend with the logit, and of equal logits the smaller id has the greater key.
struct LogitsTopkArgs {
    const float* logits;  // [rows, vocab], row stride logits_stride
    int64_t* keys;        // [rows, top_k], descending; INT64_MIN past the vocabulary
    float* max;           // [rows]; -inf without any value above it
    float* sum_exp;       // [rows], sum of exp(logit - max); 0 when max is -inf, 1 when it is +inf
    int64_t rows, vocab, logits_stride, top_k;
    int threads;
};

struct HeadTopkArgs {
    LinearArgs head;      // its y and y_stride are not used
    LogitsTopkArgs topk;  // its logits and logits_stride are not used
};

}  // namespace eagle
