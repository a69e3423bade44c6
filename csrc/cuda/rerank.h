// The draft pool's best nodes as a tree, on the device; the struct is that of the CPU kernel.
#pragma once

#include <cuda_runtime.h>

#include "../cpu/rerank.h"

namespace eagle::cuda {

constexpr int64_t kMaxRerankNodes = 256;
constexpr int64_t kMaxRerankPool = 20480;  // its 4-byte keys take 80 KiB, which every device since sm_80 grants a block

// The rule of the CPU kernel, with one exception: a chosen node whose parent was not chosen (or is not before it) cannot be reported without waiting for the device.
// It becomes a child of the root with token -1, which is never accepted, and nor is anything below it. A pool written by expand has no such node.
cudaError_t rerank(const RerankArgs& args, cudaStream_t stream);

}  // namespace eagle::cuda
