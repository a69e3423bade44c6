// out[r] = x[r], rows of bytes that may lie apart.
#pragma once

#include <cstdint>

namespace eagle {

struct CopyRowsArgs {
    const char* x;  // [rows, row_bytes], rows x_stride bytes apart
    char* out;      // [rows, row_bytes], rows out_stride bytes apart
    int64_t rows, row_bytes, x_stride, out_stride;
};

void copy_rows(const CopyRowsArgs& args);

}  // namespace eagle
