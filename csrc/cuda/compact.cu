#include "compact.h"

#include "device.h"

namespace eagle::cuda {

constexpr int kCompactThreads = 256;
constexpr int64_t kStagedBytes = 40 * 1024;  // with the offsets below 48 KiB, the most that needs no opting in; five blocks share an SM of an H200
constexpr int64_t kLongestSlice = 1024;      // Llama-3.1-8B: 2 slices of a row, 128 blocks for the 64 planes

struct CompactLaunch {
    CompactArgs args;
    unsigned slice_bytes, num_slices;
};

// One block per (plane, sequence, slice of a row's bytes); plane = K or V of a layer. Grid = layers * 2 * batch * num_slices.
// The block loads its slice of all accepted rows into shared memory, then a barrier, then it stores them. The order is safe: destinations may be sources of other rows (node 3 -> row 2
// while node 4 -> row 3), but all sources of these bytes have been read at the barrier, and no other block touches these bytes: slices and planes are disjoint, and so are the pages of
// the tentative rows of two sequences.
// Assumes row_bytes, slice_bytes and kv_cache to be multiples of sizeof(Vector). Rows whose page is outside the cache or the table are not moved.
template <typename Vector>
__global__ void __launch_bounds__(kCompactThreads) compact_kernel(const CompactLaunch launched) {
    const CompactArgs& a = launched.args;
    // Divisions of 32 bits: those of 64 are calls, with a stack frame.
    const unsigned slice = blockIdx.x % launched.num_slices, rest = blockIdx.x / launched.num_slices, batch = static_cast<unsigned>(a.batch);
    const int64_t b = rest % batch, plane = rest / batch, slice_start = static_cast<int64_t>(slice) * launched.slice_bytes;
    const unsigned page_size = static_cast<unsigned>(a.page_size);
    const int32_t* nodes = a.accepted_nodes + b * a.width;  // [width]
    const int32_t* pages = a.page_table + b * a.max_pages;  // [max_pages]
    char* cache = a.kv_cache + plane * a.pages * a.page_size * a.row_bytes + slice_start;  // [pages, page_size, row_bytes] of this plane, from this slice on
    const int64_t moves = a.num_accepted[b] < a.width - 1 ? a.num_accepted[b] : a.width - 1;
    if (nodes[0] < 0 || moves <= 0) return;

    int64_t* from = reinterpret_cast<int64_t*>(shared_memory());  // [width], byte offsets; -1: this row stays where it is
    int64_t* to = from + a.width;  // [width]
    Vector* staged = reinterpret_cast<Vector*>(shared_memory() + 16 * a.width);  // [moves, vectors]
    const auto offset = [&](int64_t row) -> int64_t {
        const unsigned entry = static_cast<unsigned>(row) / page_size, slot = static_cast<unsigned>(row) % page_size;
        if (row < 0 || row > INT32_MAX || entry >= a.max_pages || pages[entry] < 0 || pages[entry] >= a.pages) return -1;
        return (pages[entry] * a.page_size + slot) * a.row_bytes;
    };
    for (int64_t i = threadIdx.x; i < moves; i += blockDim.x) {
        const int64_t node = nodes[i + 1];
        const int64_t source = node == i + 1 ? -1 : offset(a.seq_lens[b] + node), destination = offset(a.seq_lens[b] + i + 1);
        from[i] = destination < 0 ? -1 : source;
        to[i] = destination;
    }
    __syncthreads();

    const int64_t left = a.row_bytes - slice_start;
    const unsigned vectors = static_cast<unsigned>(left < launched.slice_bytes ? left : launched.slice_bytes) / static_cast<unsigned>(sizeof(Vector));
    const unsigned items = static_cast<unsigned>(moves) * vectors;
    for (unsigned item = threadIdx.x; item < items; item += kCompactThreads) {
        const int64_t source = from[item / vectors];
        if (source >= 0) staged[item] = reinterpret_cast<const Vector*>(cache + source)[item % vectors];
    }
    __syncthreads();  // every source has been read
    for (unsigned item = threadIdx.x; item < items; item += kCompactThreads)
        if (from[item / vectors] >= 0) reinterpret_cast<Vector*>(cache + to[item / vectors])[item % vectors] = staged[item];
}

template <typename Vector>
static cudaError_t compact_as(const CompactArgs& args, cudaStream_t stream) {
    const int64_t vector_bytes = static_cast<int64_t>(sizeof(Vector)), staged = kStagedBytes / args.width < kLongestSlice ? kStagedBytes / args.width : kLongestSlice;
    const int64_t slice = staged / vector_bytes * vector_bytes, num_slices = (args.row_bytes + slice - 1) / slice;
    const int64_t longest = slice < args.row_bytes ? slice : args.row_bytes, blocks = args.layers * 2 * args.batch * num_slices;
    if (blocks > INT32_MAX || args.page_size > INT32_MAX) return cudaErrorInvalidConfiguration;
    const CompactLaunch launched{args, static_cast<unsigned>(slice), static_cast<unsigned>(num_slices)};
    return launch(compact_kernel<Vector>, blocks, kCompactThreads, args.width * (16 + longest), stream, launched);
}

cudaError_t compact(const CompactArgs& args, cudaStream_t stream) {
    if (args.width > kMaxAcceptedRows) return cudaErrorInvalidValue;
    if (args.batch == 0 || args.layers == 0 || args.row_bytes == 0 || args.width <= 1) return cudaSuccess;
    const uint64_t alignment = reinterpret_cast<uint64_t>(args.kv_cache) | static_cast<uint64_t>(args.row_bytes);
    if (alignment % 16 == 0) return compact_as<uint4>(args, stream);
    if (alignment % 4 == 0) return compact_as<uint32_t>(args, stream);
    if (alignment % 2 == 0) return compact_as<uint16_t>(args, stream);
    return compact_as<uint8_t>(args, stream);
}

}  // namespace eagle::cuda
