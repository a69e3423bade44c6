"""What the kernels on CUDA can do, checked before anything is allocated."""

from __future__ import annotations

import torch

from eagle_engine.config import EagleConfig
from eagle_engine.errors import EagleError

HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_DRAFT_VOCAB = 64 * 4096  # tiles of `head_topk` times those that `expand_topk` merges
OLDEST = (8, 0)


def check_limits(config: EagleConfig, head_dims: dict[str, int], draft_vocab: int) -> None:
    """Raise EagleError for settings or models that the CUDA kernels refuse. head_dims: "target" and "drafter" -> head_dim; draft_vocab: 0 without a drafter."""
    if config.page_size & (config.page_size - 1):
        raise EagleError(f"page_size must be a power of two on CUDA, got {config.page_size}")
    for model, head_dim in head_dims.items():
        if head_dim not in HEAD_DIMS:
            raise EagleError(f"the {model} has a head_dim of {head_dim}; on CUDA it must be one of {', '.join(map(str, HEAD_DIMS))}; use device='cpu'")
    if draft_vocab > MAX_DRAFT_VOCAB:
        raise EagleError(f"a draft vocabulary of {draft_vocab} is more than the {MAX_DRAFT_VOCAB} that the CUDA kernels take; give draft_vocab")


def check_device(device: torch.device) -> None:
    """Raise EagleError for a GPU that is too old, or an extension that was built without CUDA kernels."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise EagleError(f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; {OLDEST[0]}.{OLDEST[1]} or newer is needed; use device='cpu'")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("eagle_kernels::rerank", "CUDA"):
        raise EagleError("the native extension was built without CUDA kernels (FORCE_CUDA=0, or no nvcc at that time); build it again: pip install --no-build-isolation -e .")
