// What the two schedulers share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda_runtime.h"

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

uint64_t seed = 0;  // of the order of the fibers
size_t shared_bytes_allowed = 48 * 1024;

[[noreturn]] inline void die(const char* what) {
    std::fprintf(stderr, "cuda_shim: %s\n", what);
    std::fflush(stderr);
    std::_Exit(70);
}

// Checks that a GPU would make before the launch; the allowance of shared memory is that of one launch.
inline cudaError_t check_launch(const cudaLaunchConfig_t& config) {
    const size_t allowed = shared_bytes_allowed;
    shared_bytes_allowed = 48 * 1024;
    if (config.gridDim.x == 0 || config.blockDim.x == 0 || config.blockDim.x > 1024 || config.dynamicSmemBytes > allowed) return cudaErrorInvalidValue;
    if (config.blockDim.x % 32 != 0) die("a block is not of whole warps");
    return cudaSuccess;
}

// A block's shared memory, exactly as large as the launch says (so AddressSanitizer sees the byte after it), with absurd contents.
inline char* new_shared_memory(size_t bytes) {
    char* memory = static_cast<char*>(std::malloc(bytes));  // aligned to 16 bytes
    std::memset(memory, 0xA5, bytes);
    return memory;
}

}  // namespace shim
