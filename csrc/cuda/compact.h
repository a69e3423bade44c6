// Accepted rows moved on the device, all layers, K and V, in one launch; struct and rule are those of the CPU kernel.
#pragma once

#include <cuda_runtime.h>

#include "../cpu/compact.h"

namespace eagle::cuda {

constexpr int64_t kMaxAcceptedRows = 256;  // width of accepted_nodes, at most

cudaError_t compact(const CompactArgs& args, cudaStream_t stream);

}  // namespace eagle::cuda
