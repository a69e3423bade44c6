// The CPU kernels for avx512 with the matrix unit of AMX for bf16 weights.
#if defined(__x86_64__)
// Standard headers come before the target pragma, so that no shared inline function is compiled for instructions that another processor may lack.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include <immintrin.h>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,amx-tile,amx-bf16")
#endif

#define EK_AVX512
#define EK_AMX
#define EK_ISA amx
#include "kernels_of_isa.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
