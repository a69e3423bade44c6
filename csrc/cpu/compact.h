// Accepted rows of the tree moved next to the committed rows, in place, all layers.
#pragma once

#include <cstdint>

namespace eagle {

struct CompactArgs {
    char* kv_cache;                 // [layers, 2, pages, page_size, row_bytes]
    const int32_t* page_table;      // [batch, max_pages]
    const int32_t* seq_lens;        // [batch]
    const int32_t* accepted_nodes;  // [batch, width]
    const int32_t* num_accepted;    // [batch]
    int64_t layers, pages, page_size, row_bytes, batch, max_pages, width;
};

void compact(const CompactArgs& args);

}  // namespace eagle
