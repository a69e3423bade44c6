"""The ops in plain PyTorch and Python: slow, obvious, the specification that every kernel is tested against."""

from .accept import accept
from .accept_rejection import accept_rejection
from .advance import advance
from .ancestor_mask import pack_ancestor_mask, unpack_ancestor_mask
from .compact import compact
from .copy_rows import copy_rows
from .expand import expand
from .expand_topk import expand_topk
from .gumbel_noise import gumbel_noise, uniform_noise
from .head_topk import head_topk, logits_topk
from .linear import embedding, expert_linear, linear, route_experts
from .rerank import rerank
from .rms_norm import rms_norm
from .rope_store_kv import rope_store_kv
from .sample import draw_children, filter_probs, sample
from .silu_mul import silu_mul
from .tree_attention import tree_attention

__all__ = [
    "accept",
    "accept_rejection",
    "advance",
    "compact",
    "copy_rows",
    "draw_children",
    "embedding",
    "expand",
    "expand_topk",
    "expert_linear",
    "filter_probs",
    "gumbel_noise",
    "head_topk",
    "linear",
    "logits_topk",
    "pack_ancestor_mask",
    "rerank",
    "rms_norm",
    "rope_store_kv",
    "route_experts",
    "sample",
    "silu_mul",
    "tree_attention",
    "uniform_noise",
    "unpack_ancestor_mask",
]
