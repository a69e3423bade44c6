// y = silu(gate) * up.
#pragma once

#include <cstdint>

namespace eagle {

struct SiluMulArgs {
    const float* gate_up;  // [rows, 2 * size], row stride stride: gate, then up
    float* y;              // [rows, size], row stride y_stride
    int64_t rows, size, stride, y_stride;
    int threads;
};

}  // namespace eagle
