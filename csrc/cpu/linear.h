// y = x W^T + bias over packed weights, and row lookup in packed weights.
#pragma once

#include <cstdint>

namespace eagle {

enum class Dtype { fp32, bf16 };

// Packed weight of N outputs and K inputs: panels of 16 outputs, each read from front to back.
//   fp32  [panels, K, 16]            element (k, j) of a panel at k * 16 + j
//   bf16  [panels, K2 / 2, 16, 2]    K2 = K rounded up to even; element (k, j) at (k / 2) * 32 + j * 2 + k % 2
struct LinearArgs {
    const float* x;           // [rows, in_features], row stride x_stride
    const void* weight;       // [experts, panels, K or K2, 16]
    const float* bias;        // [out_features] or null
    const int32_t* experts;   // [rows] or null; a row with an expert id outside [0, num_experts) gives zeros
    float* y;                 // [rows, out_features], row stride y_stride
    int64_t rows, in_features, out_features, x_stride, y_stride, num_experts;
    Dtype weight_dtype;
    int threads;
};

struct EmbeddingArgs {
    const int64_t* ids;  // [rows]; ids below 0 read row 0
    const void* weight;
    float* y;  // [rows, in_features] contiguous
    int64_t rows, in_features, out_features;
    Dtype weight_dtype;
    int threads;
};

}  // namespace eagle
