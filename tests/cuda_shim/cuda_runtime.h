// The words of CUDA that the kernels of csrc/cuda use, for g++: each CUDA thread runs on a CPU, with real barriers. Test-only.
//
// One launch() with two schedulers. EAGLE_SHIM_THREADS: a thread of the system per CUDA thread, blocks live together, for ThreadSanitizer. Otherwise: fibers of one thread, whose
// order is drawn from a seed whenever they wait; fast, deterministic, and good for AddressSanitizer.
// A shuffle, ballot or reduction makes the lanes wait for each other but orders no memory, as on the GPU: only __syncwarp and __syncthreads do.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
using cudaStream_t = void*;
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
};

namespace shim {

constexpr size_t kMostSharedBytes = 99 * 1024;  // of a block on sm_86, 89 and 120

// Runs body once per CUDA thread; an error in the use of barriers ends the process with a message.
cudaError_t launch(const cudaLaunchConfig_t& config, const std::function<void()>& body);
extern size_t shared_bytes_allowed;

// Every lane's value; the lanes of a warp wait for each other, no memory is ordered.
struct WarpValues {
    uint64_t lane[32];
};
WarpValues exchange(uint64_t value);
void sync_warp();
void sync_block();
bool sync_block_or(bool value);

template <typename T>
uint64_t to_bits(T value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <typename T>
T from_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}
inline int lane() { return static_cast<int>(threadIdx.x % 32); }

}  // namespace shim

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
    if (static_cast<size_t>(bytes) > shim::kMostSharedBytes) return cudaErrorInvalidValue;
    shim::shared_bytes_allowed = static_cast<size_t>(bytes);
    return cudaSuccess;
}
template <typename Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Args), const Args& args) {
    return shim::launch(*config, [kernel, &args] { kernel(args); });
}

inline void __syncthreads() { shim::sync_block(); }
inline int __syncthreads_or(int value) { return shim::sync_block_or(value != 0); }
inline void __syncwarp() { shim::sync_warp(); }

// Masks: the kernels use whole warps only.
inline unsigned __ballot_sync(unsigned, int predicate) {
    const shim::WarpValues values = shim::exchange(predicate != 0);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(values.lane[i]) << i;
    return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
template <typename T>
T __shfl_sync(unsigned, T value, int source) {
    return shim::from_bits<T>(shim::exchange(shim::to_bits(value)).lane[source & 31]);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
    const unsigned source = static_cast<unsigned>(shim::lane()) + delta;
    const shim::WarpValues values = shim::exchange(shim::to_bits(value));
    return source < 32 ? shim::from_bits<T>(values.lane[source]) : value;
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
    const shim::WarpValues values = shim::exchange(shim::to_bits(value));
    T greatest = shim::from_bits<T>(values.lane[0]);
    for (int i = 1; i < 32; ++i) greatest = std::max(greatest, shim::from_bits<T>(values.lane[i]));
    return greatest;
}
template <typename T>
T __reduce_add_sync(unsigned, T value) {
    const shim::WarpValues values = shim::exchange(shim::to_bits(value));
    T sum = 0;
    for (int i = 0; i < 32; ++i) sum += shim::from_bits<T>(values.lane[i]);
    return sum;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
