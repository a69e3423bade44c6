// What the CUDA kernels share: launching, the block's shared memory, reductions over a warp. All blocks are one-dimensional, whole warps, and use dynamic shared memory alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace eagle::cuda {

constexpr unsigned kFullMask = 0xFFFFFFFFu;

#if defined(__CUDACC__)
__device__ inline char* shared_memory() {
    extern __shared__ __align__(16) char bytes[];
    return bytes;
}
#else
char* shared_memory();  // the tests run these kernels on a CPU and bring their own
#endif

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x / 32); }
__device__ inline int num_warps() { return static_cast<int>(blockDim.x / 32); }

// Greatest key of a warp, in all of its lanes. Two 32-bit reductions (one instruction each since sm_80) instead of five 64-bit shuffles.
__device__ inline int64_t warp_max(int64_t key) {
    const int high = static_cast<int>(key >> 32);
    const int greatest = __reduce_max_sync(kFullMask, high);
    const unsigned low = __reduce_max_sync(kFullMask, high == greatest ? static_cast<unsigned>(static_cast<uint64_t>(key) & 0xFFFFFFFFu) : 0u);
    return static_cast<int64_t>((static_cast<uint64_t>(static_cast<uint32_t>(greatest)) << 32) | low);
}

template <typename Args>
cudaError_t launch(void (*kernel)(Args), int64_t blocks, int threads, int64_t shared_bytes, cudaStream_t stream, const Args& args) {
    if (shared_bytes > 48 * 1024) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
        if (error != cudaSuccess) return error;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace eagle::cuda
