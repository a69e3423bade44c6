// y = weight * h / sqrt(mean(h^2) + eps), h = x or residual += x.
#pragma once

#include <cstdint>

namespace eagle {

struct RmsNormArgs {
    const float* x;       // [rows, size]; row r = (outer, inner) at outer * x_outer_stride + inner * x_inner_stride
    const float* weight;  // [size]
    float* residual;      // [rows, size] contiguous or null; updated
    float* y;             // as x, with its own strides
    int64_t outer, inner, size, x_outer_stride, x_inner_stride, y_outer_stride, y_inner_stride;
    float eps;
    int threads;
};

}  // namespace eagle
