"""Which files and which dtype the arguments of Engine.from_pretrained mean."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle_engine.demo import demo_drafter_path
from eagle_engine.errors import EagleError

DEMO = "demo"
DEMO_DRAFT_VOCAB = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")


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


def engine_device(wanted: str) -> torch.device:
    """wanted "auto" (CUDA where there is a GPU, else the CPU), "cpu" or "cuda"."""
    if wanted not in DEVICES:
        raise EagleError(f"device: expected one of {', '.join(DEVICES)}, got {wanted!r}")
    if wanted == "cuda" and not torch.cuda.is_available():
        reason = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        raise EagleError(f"device cuda was asked for, but {reason}; use device='cpu' or 'auto'")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def weights_dtype(wanted: str, stored: str, is_gguf: bool, device: torch.device) -> torch.dtype:
    """wanted "auto", "float32", "bfloat16" or "float16"; stored: dtype of the checkpoint. On CUDA "auto" keeps float16 and makes bfloat16 of all others."""
    if device.type == "cuda" and wanted == "auto":
        return torch.float16 if stored == "float16" and not is_gguf else torch.bfloat16
    if wanted == "auto":
        return torch.float32 if stored == "float32" and not is_gguf else torch.bfloat16
    return DTYPES[wanted]
