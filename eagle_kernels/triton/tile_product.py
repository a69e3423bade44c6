"""The tile of x W^T that `linear` and `head_topk` share, so that a logit has the same bits in both."""

import triton
import triton.language as tl

from eagle_kernels.triton.common import dot

# 64 rows always, however few there are: with fewer, Triton would use another family of matrix instructions (mma.sync for 16 and 32, wgmma or tcgen05 from 64 on), and a
# row's bits could depend on how many rows share the launch. k ascends in steps of 128, 256 bytes of a row of W.
BLOCK_M, BLOCK_K = 64, 128


@triton.jit
def tile_product(
    x_ptr,  # [num_rows, depth], row stride stride_x
    weight_ptr,  # [out_features, depth] contiguous
    num_rows,
    out_features,
    depth,
    stride_x,
    rows,  # [BLOCK_M]
    columns,  # [BLOCK_N]
    EVEN_K: tl.constexpr,  # depth is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """fp32 [BLOCK_M, BLOCK_N]: one chain over ascending k. Columns past the end repeat the last one: a load without a mask, of a result that nobody stores. Rows past the end are not loaded: for one row
    of 64 that would be four times the bytes of W, from L2."""
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x + k[None, :]
    exists = (rows < num_rows)[:, None]
    weight_ptrs = weight_ptr + tl.minimum(columns, out_features - 1).to(tl.int64)[None, :] * depth + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        # x is read by every program and should stay in the cache; W goes through once.
        if EVEN_K:
            x = tl.load(x_ptrs, mask=exists, other=0.0, eviction_policy="evict_last")
            weight = tl.load(weight_ptrs, eviction_policy="evict_first")
        else:
            inside = k < depth - start
            x = tl.load(x_ptrs, mask=exists & inside[None, :], other=0.0, eviction_policy="evict_last")
            weight = tl.load(weight_ptrs, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
        acc = dot(x, weight, acc)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    return acc
