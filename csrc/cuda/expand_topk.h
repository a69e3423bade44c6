// One level of the draft tree on the device, in one launch; struct and rule are those of the CPU kernel.
#pragma once

#include <cuda_runtime.h>

#include "../cpu/expand_topk.h"

namespace eagle::cuda {

constexpr int64_t kMaxFrontier = 64;  // and as many children of each

cudaError_t expand_topk(const ExpandTopkArgs& args, cudaStream_t stream);

}  // namespace eagle::cuda
