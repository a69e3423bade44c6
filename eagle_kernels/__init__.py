"""Kernels for EAGLE speculative decoding. Every op has a reference of the same signature in `eagle_kernels.reference`."""

from eagle_kernels._extension import available_isas, isa, set_isa
from eagle_kernels.accept import accept, accept_rejection
from eagle_kernels.advance import advance
from eagle_kernels.compact import compact
from eagle_kernels.copy_rows import copy_rows
from eagle_kernels.expand import expand, expand_topk
from eagle_kernels.gumbel_noise import gumbel_noise, uniform_noise
from eagle_kernels.head_topk import head_topk, logits_topk
from eagle_kernels.linear import PackedWeight, embedding, expert_linear, linear, pack_weight, route_experts, slice_outputs, unpack_weight
from eagle_kernels.recording import Recording, record
from eagle_kernels.rerank import rerank
from eagle_kernels.rms_norm import rms_norm
from eagle_kernels.rope_store_kv import rope_store_kv
from eagle_kernels.sample import draw_children, filter_probs, sample
from eagle_kernels.silu_mul import silu_mul
from eagle_kernels.tree_attention import tree_attention
from eagle_kernels.types import Accepted, DraftPool, Frontier, HeadTopK, Tree

__all__ = [
    "Accepted", "DraftPool", "Frontier", "HeadTopK", "PackedWeight", "Recording", "Tree", "accept", "accept_rejection", "advance", "available_isas", "compact", "copy_rows", "draw_children", "embedding", "expand", "expand_topk", "expert_linear", "filter_probs",
    "gumbel_noise", "head_topk", "isa", "linear", "logits_topk", "pack_weight", "record", "rerank", "rms_norm", "rope_store_kv", "route_experts", "sample", "set_isa", "silu_mul", "slice_outputs", "tree_attention", "uniform_noise", "unpack_weight",
]  # fmt: skip
