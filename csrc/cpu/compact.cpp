#include "compact.h"

#include <cstring>

namespace eagle {

// accepted_nodes ascends with accepted_nodes[i] >= i, so in order of i no row is overwritten before it has been read.
void compact(const CompactArgs& a) {
    const int64_t plane_bytes = a.pages * a.page_size * a.row_bytes;
    for (int64_t b = 0; b < a.batch; ++b) {
        const int32_t* nodes = a.accepted_nodes + b * a.width;
        const int32_t* pages = a.page_table + b * a.max_pages;
        const auto offset = [&](int64_t row) { return (pages[row / a.page_size] * a.page_size + row % a.page_size) * a.row_bytes; };
        if (nodes[0] < 0) continue;
        for (int64_t i = 1; i <= a.num_accepted[b]; ++i) {
            if (nodes[i] == i) continue;
            const int64_t from = offset(a.seq_lens[b] + nodes[i]), to = offset(a.seq_lens[b] + i);
            for (int64_t plane = 0; plane < a.layers * 2; ++plane) std::memcpy(a.kv_cache + plane * plane_bytes + to, a.kv_cache + plane * plane_bytes + from, a.row_bytes);
        }
    }
}

}  // namespace eagle
