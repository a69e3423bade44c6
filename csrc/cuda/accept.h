// The walk down the tree on the device; struct and rule are those of the CPU kernel.
#pragma once

#include <cuda_runtime.h>

#include "../cpu/accept.h"

namespace eagle::cuda {

// Any number of sequences and nodes.
cudaError_t accept(const AcceptArgs& args, cudaStream_t stream);

}  // namespace eagle::cuda
