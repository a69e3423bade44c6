#include "copy_rows.h"

#include <cstring>

namespace eagle {

void copy_rows(const CopyRowsArgs& a) {
    for (int64_t r = 0; r < a.rows; ++r) std::memcpy(a.out + r * a.out_stride, a.x + r * a.x_stride, a.row_bytes);
}

}  // namespace eagle
