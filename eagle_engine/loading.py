"""Which files and which dtype the arguments of Engine.from_pretrained mean."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle_engine.demo import demo_drafter_path
from eagle_engine.errors import EagleError

DEMO = "demo"
DEMO_DRAFT_VOCAB = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def drafter_path(draft: str | Path | None, is_demo: bool) -> Path | None:
    """The drafter directory that `draft` of Engine.from_pretrained means; None: plain decoding."""
    if draft is None or str(draft) == "none":
        return None
    if str(draft) == "auto":
        if is_demo:
            return demo_drafter_path()
        raise EagleError("no drafter is known for this target: give draft a drafter directory or hub id, or 'none' for plain decoding")
    path = Path(draft).expanduser()
    if path.exists() or str(draft).startswith((".", "/", "~")) or str(draft).count("/") != 1:
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(draft), allow_patterns=["config.json", "*.safetensors", "pytorch_model.bin"]))
    except Exception as error:  # network, permission, unknown name: many exception types, one remedy
        raise EagleError(f"{draft!r} is no local drafter directory, and fetching it from the Hugging Face hub failed: {error}") from error


def weights_dtype(wanted: str, stored: str, is_gguf: bool) -> torch.dtype:
    """wanted "auto", "float32" or "bfloat16"; stored: dtype of the checkpoint."""
    if wanted == "auto":
        return torch.float32 if stored == "float32" and not is_gguf else torch.bfloat16
    return DTYPES[wanted]
