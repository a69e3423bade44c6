"""accept_rejection on CUDA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_kernels.checks import check_tensor, refuse
from eagle_kernels.triton.common import AotCase
from eagle_kernels.triton.noise import gumbel_of, noise_words, token_words, uniform_of

MAX_NODES = 256
# A sequence has one SM to itself: 16 warps, 4 tokens per thread.
CONSTANTS = {"NODES": MAX_NODES, "BLOCK": 2048}
OPTIONS = {"num_warps": 16, "num_stages": 1, "enable_fp_fusion": False}


@triton.jit
def _load_pair(target_ptr, draft_ptr, p_ptr, q_ptr, rejections, vocab_size, i):
    """p and q fp64 at a node: as given before its first rejection, from the scratch after it; 0 past the end."""
    given = i < tl.where(rejections == 0, vocab_size, 0)
    kept = i < tl.where(rejections == 0, 0, vocab_size)
    p = tl.where(kept, tl.load(p_ptr + i, mask=kept, other=0.0), tl.load(target_ptr + i, mask=given, other=0.0).to(tl.float64))
    q = tl.where(kept, tl.load(q_ptr + i, mask=kept, other=0.0), tl.load(draft_ptr + i, mask=given, other=0.0).to(tl.float64))
    return p, q


@triton.jit
def _reject(target_ptr, draft_ptr, p_ptr, q_ptr, rejections, token, vocab_size, BLOCK: tl.constexpr):
    """p = normalise(max(0, p - q)); q[token] = 0; q = normalise(q); a sum of 0 changes nothing. Sums in fp64: BLOCK chains, then one tree."""
    lane = tl.arange(0, BLOCK)
    p_masses = tl.zeros((BLOCK,), tl.float64)
    q_masses = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, vocab_size, BLOCK):
        i = first + lane
        p, q = _load_pair(target_ptr, draft_ptr, p_ptr, q_ptr, rejections, vocab_size, i)
        p_masses += tl.where(p - q > 0.0, p - q, 0.0)
        q_masses += tl.where(i == token, 0.0, q)
    p_mass = tl.sum(p_masses, 0)
    q_mass = tl.sum(q_masses, 0)
    for first in range(0, vocab_size, BLOCK):
        i = first + lane
        p, q = _load_pair(target_ptr, draft_ptr, p_ptr, q_ptr, rejections, vocab_size, i)
        rest = tl.where(p - q > 0.0, p - q, 0.0)
        left = tl.where(i == token, 0.0, q)
        tl.store(p_ptr + i, tl.where(p_mass > 0.0, rest / p_mass, p), mask=i < vocab_size)
        tl.store(q_ptr + i, tl.where(q_mass > 0.0, left / q_mass, left), mask=i < vocab_size)
    tl.debug_barrier()  # other threads read single numbers of them


@triton.jit(do_not_specialize=["max_depth", "num_nodes"])
def _accept_rejection_kernel(
    tokens_ptr,  # [B, num_nodes] int64
    parent_ptr,  # [B, num_nodes] int32, parent[i] < i
    target_ptr,  # [B, num_nodes, vocab_size] fp32
    draft_ptr,  # [B, num_nodes, vocab_size] fp32
    seeds_ptr,  # [B] int64
    positions_ptr,  # [B] int64
    active_ptr,  # [B] uint8
    accepted_nodes_ptr,  # [B, max_depth + 1] int32
    num_accepted_ptr,  # [B] int32
    bonus_ptr,  # [B] int64
    scratch_ptr,  # [B, 2, vocab_size] fp64
    num_nodes,
    vocab_size,
    max_depth,
    NODES: tl.constexpr,  # at least num_nodes
    BLOCK: tl.constexpr,
):
    """The walk of one sequence: a node's row is read when one of its children is rejected, and at the end. Grid (B)."""
    b = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, NODES)
    parents = tl.load(parent_ptr + b * num_nodes + slot, mask=slot < num_nodes, other=-1)
    tokens_ptr += b * num_nodes
    accepted_nodes_ptr += b * (max_depth + 1)
    p_ptr = scratch_ptr + b * 2 * vocab_size
    q_ptr = p_ptr + vocab_size
    seed = tl.load(seeds_ptr + b)
    first_position = tl.load(positions_ptr + b)
    active = tl.load(active_ptr + b) != 0
    zero = tl.min(slot, 0)
    node = zero
    depth = zero
    rejections = zero
    walking = tl.where(active, 1, 0)
    for start in range(0, max_depth + 1, NODES):
        tl.store(accepted_nodes_ptr + start + slot, tl.where((start + slot == 0) & (slot < walking), 0, -1), mask=start + slot <= max_depth)
    tl.debug_barrier()  # accepted nodes are stored over these
    while walking != 0:
        walking = zero
        rejections = zero
        row = (b * num_nodes + node) * vocab_size
        ordinal = zero
        child = node
        searching = tl.where(depth < max_depth, 1, 0)
        while searching != 0:
            child = tl.min(tl.where((parents == node) & (slot > child), slot, NODES), 0)
            if child < num_nodes:
                token = tl.load(tokens_ptr + child)
                if (token >= 0) & (token < vocab_size):
                    coin = tl.max(uniform_of(token_words(seed, first_position + depth, 2, ordinal + tl.arange(0, 1))), 0)
                    if rejections == 0:
                        p = tl.load(target_ptr + row + token).to(tl.float64)
                        q = tl.load(draft_ptr + row + token).to(tl.float64)
                    else:
                        p = tl.load(p_ptr + token)
                        q = tl.load(q_ptr + token)
                    if coin.to(tl.float64) * q < p:
                        depth += 1
                        node = child
                        tl.store(accepted_nodes_ptr + depth, child)
                        walking = zero + 1
                        searching = zero
                    else:
                        _reject(target_ptr + row, draft_ptr + row, p_ptr, q_ptr, rejections, token, vocab_size, BLOCK)
                        rejections += 1
                ordinal += 1
            else:
                searching = zero

    bonus = zero - 1
    if active:
        row = (b * num_nodes + node) * vocab_size
        best = tl.full((BLOCK,), -float("inf"), tl.float64)
        best_id = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, vocab_size, BLOCK):
            i = first + tl.arange(0, BLOCK)
            p, q = _load_pair(target_ptr + row, draft_ptr + row, p_ptr, q_ptr, rejections, vocab_size, i)
            noise = gumbel_of(noise_words(seed, first_position + depth, 3, first, BLOCK))
            score = tl.where(p > 0.0, tl.log(tl.where(p > 0.0, p, 1.0)) + noise.to(tl.float64), -float("inf"))
            best_id = tl.where(score > best, i, best_id)
            best = tl.where(score > best, score, best)
        greatest = tl.max(best, 0)
        bonus = tl.where(greatest > -float("inf"), tl.min(tl.where(best == greatest, best_id, vocab_size), 0), -1)
    tl.store(num_accepted_ptr + b, depth)
    tl.store(bonus_ptr + b, bonus.to(tl.int64))


def accept_rejection(
    tokens: Tensor, parent: Tensor, target_probs: Tensor, draft_probs: Tensor, seeds: Tensor, positions: Tensor, active: Tensor,
    accepted_nodes: Tensor, num_accepted_drafts: Tensor, bonus_token: Tensor,
) -> None:  # fmt: skip
    """The op eagle_kernels::accept_rejection on CUDA; shapes as in eagle_kernels.accept_rejection, with at most 256 nodes."""
    check_tensor("tokens", tokens, (None, None), torch.int64)
    batch, num_nodes = tokens.shape
    device = tokens.device
    refuse(not 1 <= num_nodes <= MAX_NODES, "tokens", f"1 to {MAX_NODES} nodes", num_nodes)
    check_tensor("parent", parent, (batch, num_nodes), torch.int32, device)
    check_tensor("target_probs", target_probs, (batch, num_nodes, None), torch.float32, device)
    vocab_size = target_probs.shape[2]
    check_tensor("draft_probs", draft_probs, (batch, num_nodes, vocab_size), torch.float32, device)
    check_tensor("seeds", seeds, (batch,), torch.int64, device)
    check_tensor("positions", positions, (batch,), torch.int64, device)
    check_tensor("active", active, (batch,), torch.bool, device)
    check_tensor("accepted_nodes", accepted_nodes, (batch, None), torch.int32, device)
    max_depth = accepted_nodes.shape[1] - 1
    refuse(max_depth < 0, "accepted_nodes", "room for the root", 0)
    check_tensor("num_accepted_drafts", num_accepted_drafts, (batch,), torch.int32, device)
    check_tensor("bonus_token", bonus_token, (batch,), torch.int64, device)
    if batch == 0:
        return
    scratch = torch.empty(batch, 2, vocab_size, dtype=torch.float64, device=device)
    _accept_rejection_kernel[(batch,)](
        tokens, parent, target_probs, draft_probs, seeds, positions, active.view(torch.uint8), accepted_nodes, num_accepted_drafts, bonus_token, scratch, num_nodes, vocab_size, max_depth,
        **CONSTANTS, **OPTIONS,
    )  # fmt: skip


def aot_cases() -> list[AotCase]:
    """Every configuration that `accept_rejection` can launch."""
    signature = {"tokens_ptr": "*i64", "parent_ptr": "*i32", "target_ptr": "*fp32", "draft_ptr": "*fp32", "seeds_ptr": "*i64", "positions_ptr": "*i64", "active_ptr": "*u8"}
    signature |= {"accepted_nodes_ptr": "*i32", "num_accepted_ptr": "*i32", "bonus_ptr": "*i64", "scratch_ptr": "*fp64"}
    pointers = tuple(signature)
    signature |= dict.fromkeys(("num_nodes", "vocab_size", "max_depth"), "i32") | dict.fromkeys(CONSTANTS, "constexpr")
    return [AotCase("accept_rejection", _accept_rejection_kernel, signature, CONSTANTS, (*pointers, "vocab_size"), OPTIONS, small=True)]
