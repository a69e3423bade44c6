"""sample, filter_probs and draw_children on CUDA: launches of the kernel of sample_kernels.py."""

import torch
from torch import Tensor

from eagle_kernels.checks import check_tensor, refuse
from eagle_kernels.triton.common import AotCase
from eagle_kernels.triton.sample_kernels import CHILDREN, MAX_CHILDREN, PROBS, TOKENS, _sample_kernel

MAX_VOCAB = (1 << 23) - 1
# A row has one SM to itself, and its noise keeps the arithmetic units busy: 16 warps, 4 tokens per thread, in 128 registers.
OPTIONS = {"num_warps": 16, "num_stages": 1, "enable_fp_fusion": False}


def _constants(mode: int, adjust: bool) -> dict:
    return {"MODE": mode, "ADJUST": adjust, "BLOCK": 2048, "CAPACITY": 4096, "NUM_THRESHOLDS": 4}


def _check_rows(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    check_tensor("logits", logits, (None, None), torch.float32, contiguous="last")
    refuse(not 1 <= logits.shape[1] <= MAX_VOCAB, "logits", f"a vocabulary of 1 to {MAX_VOCAB}", logits.shape[1])
    for name, tensor, dtype in (("temperature", temperature, torch.float32), ("top_k", top_k, torch.int32), ("top_p", top_p, torch.float32), ("min_p", min_p, torch.float32)):
        check_tensor(name, tensor, logits.shape[:1], dtype, logits.device)


def _launch(mode: int, logits: Tensor, parameters: tuple[Tensor, ...], keys: tuple[Tensor, Tensor], out: Tensor, log_probs: Tensor | None, min_p_first: bool, lanes: int, count: int,
            adjustments: tuple[Tensor | None, ...]) -> None:  # fmt: skip
    """adjustments: logit_bias, repetition_penalty, presence_penalty, frequency_penalty, prompt_mask, output_counts."""
    if logits.shape[0] == 0:
        return
    adjust = any(tensor is not None for tensor in adjustments[:4])
    # What stands in for an absent tensor has its dtype, so that no other kernel is compiled for it.
    absent = (logits, *parameters[:1] * 3, parameters[1].view(torch.uint8), parameters[1])
    pointers = [other if tensor is None else tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor, other in zip(adjustments, absent)]
    constants = _constants(mode, adjust)
    list_z = torch.empty(logits.shape[0], constants["CAPACITY"], dtype=torch.float32, device=logits.device)
    list_ids = torch.empty_like(list_z, dtype=torch.int32)
    has = [int(tensor is not None) for tensor in adjustments]
    _sample_kernel[(logits.shape[0],)](
        logits, *parameters, *keys, *pointers, out, logits if log_probs is None else log_probs, list_z, list_ids,
        logits.stride(0), logits.shape[1], int(min_p_first), lanes, count, *has, int(log_probs is not None), **constants, **OPTIONS,
    )  # fmt: skip


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor, min_p_first: bool, logit_bias: Tensor | None,
    repetition_penalty: Tensor | None, presence_penalty: Tensor | None, frequency_penalty: Tensor | None, prompt_mask: Tensor | None, output_counts: Tensor | None,
    out: Tensor, log_probs: Tensor | None,
) -> None:  # fmt: skip
    """The op eagle_kernels::sample on CUDA; shapes as in eagle_kernels.sample."""
    _check_rows(logits, temperature, top_k, top_p, min_p)
    rows, vocab_size = logits.shape
    for name, tensor, shape, dtype in (
        ("seeds", seeds, (rows,), torch.int64),
        ("positions", positions, (rows,), torch.int64),
        ("logit_bias", logit_bias, (rows, vocab_size), torch.float32),
        ("repetition_penalty", repetition_penalty, (rows,), torch.float32),
        ("presence_penalty", presence_penalty, (rows,), torch.float32),
        ("frequency_penalty", frequency_penalty, (rows,), torch.float32),
        ("prompt_mask", prompt_mask, (rows, vocab_size), torch.bool),
        ("output_counts", output_counts, (rows, vocab_size), torch.int32),
        ("out", out, (rows,), torch.int64),
        ("log_probs", log_probs, (rows,), torch.float32),
    ):
        if tensor is not None:
            check_tensor(name, tensor, shape, dtype, logits.device)
    adjustments = (logit_bias, repetition_penalty, presence_penalty, frequency_penalty, prompt_mask, output_counts)
    _launch(TOKENS.value, logits, (temperature, top_k, top_p, min_p), (seeds, positions), out, log_probs, min_p_first, 1, 1, adjustments)


def filter_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, min_p_first: bool, out: Tensor) -> None:
    """The op eagle_kernels::filter_probs on CUDA; shapes as in eagle_kernels.filter_probs."""
    _check_rows(logits, temperature, top_k, top_p, min_p)
    check_tensor("out", out, logits.shape, torch.float32, logits.device)
    _launch(PROBS.value, logits, (temperature, top_k, top_p, min_p), (top_k, top_k), out, None, min_p_first, 1, 1, (None,) * 6)


def draw_children(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor, lanes: int, min_p_first: bool, out: Tensor
) -> None:
    """The op eagle_kernels::draw_children on CUDA; shapes as in eagle_kernels.draw_children."""
    _check_rows(logits, temperature, top_k, top_p, min_p)
    rows = logits.shape[0]
    check_tensor("seeds", seeds, (rows,), torch.int64, logits.device)
    check_tensor("positions", positions, (rows,), torch.int64, logits.device)
    check_tensor("out", out, (rows, None), torch.int64, logits.device)
    refuse(not 1 <= out.shape[1] <= MAX_CHILDREN.value, "count", f"1 to {MAX_CHILDREN.value}", out.shape[1])
    refuse(lanes < 1, "lanes", "1 or more", lanes)
    _launch(CHILDREN.value, logits, (temperature, top_k, top_p, min_p), (seeds, positions), out, None, min_p_first, lanes, out.shape[1], (None,) * 6)


def aot_cases() -> list[AotCase]:
    """Every configuration that the three launchers can choose."""
    cases = []
    for name, mode, adjust in (("sample", TOKENS, False), ("sample-penalties", TOKENS, True), ("filter_probs", PROBS, False), ("draw_children", CHILDREN, False)):
        constants = _constants(mode.value, adjust)
        signature = {"logits_ptr": "*fp32", "temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "seeds_ptr": "*i64", "positions_ptr": "*i64"}
        signature |= {"bias_ptr": "*fp32", "repetition_ptr": "*fp32", "presence_ptr": "*fp32", "frequency_ptr": "*fp32", "prompt_ptr": "*u8", "counts_ptr": "*i32"}
        signature |= {"out_ptr": "*fp32" if mode is PROBS else "*i64", "log_probs_ptr": "*fp32", "list_z_ptr": "*fp32", "list_ids_ptr": "*i32"}
        if mode is PROBS:  # which has no noise, and is given top_k for the two
            signature |= {"seeds_ptr": "*i32", "positions_ptr": "*i32"}
        pointers = tuple(signature)
        flags = ("has_bias", "has_repetition", "has_presence", "has_frequency", "has_prompt", "has_counts", "has_log_probs")
        signature |= {"stride_x": "i64", "vocab_size": "i32", "min_p_first": "i32", "lanes": "i32", "count": "i32"} | dict.fromkeys(flags, "i32") | dict.fromkeys(constants, "constexpr")
        cases.append(AotCase(name, _sample_kernel, signature, constants, (*pointers, "stride_x", "vocab_size"), OPTIONS, small=True))
    return cases
