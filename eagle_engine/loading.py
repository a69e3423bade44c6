"""From the arguments of Engine.from_pretrained to models: files, device, dtype, sizes."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.config import EagleConfig
from eagle_engine.demo import DEMO_DRAFTERS, demo_drafter_path, demo_target_path
from eagle_engine.drafter import Drafter
from eagle_engine.errors import EagleError
from eagle_engine.target import TargetModel
from eagle_engine.tokenizer import Tokenizer
from eagle_engine.tree_shape import PLAIN, tree_shape

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
    if is_demo and str(draft) in DEMO_DRAFTERS:
        return demo_drafter_path(str(draft))
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


def config_of(config: EagleConfig | None, options: dict) -> EagleConfig:
    """The configuration that was given, or one of single options."""
    if config is not None:
        if options:
            raise EagleError(f"give config or single options ({', '.join(options)}), not both")
        return config
    unknown = [name for name in options if name not in EagleConfig.__dataclass_fields__]
    if unknown:
        raise EagleError(f"unknown option {unknown[0]!r}; options are {', '.join(EagleConfig.__dataclass_fields__)}")
    return EagleConfig(**options)


def load_models(
    target: str | Path, draft: str | Path | None, config: EagleConfig, device: str, dtype: str, draft_vocab: int | str | Path | None, draft_layer_ids: str | None, draft_window: int, progress: bool
) -> tuple[TargetModel, Drafter | None, Tokenizer]:
    """Target, drafter and tokenizer; arguments as in Engine.from_pretrained."""
    if dtype != "auto" and dtype not in DTYPES:
        raise EagleError(f"dtype: expected auto, {' or '.join(DTYPES)}, got {dtype!r}")
    is_demo = str(target) == DEMO
    where = engine_device(device)
    draft_path = drafter_path(draft, is_demo)
    checkpoint = open_checkpoint(demo_target_path(progress) if is_demo else target)
    weight_dtype = weights_dtype(dtype, checkpoint.config.dtype, checkpoint.gguf_metadata is not None, where)
    longest = checkpoint.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise EagleError(f"max_model_len {config.max_model_len} is more than the target was made for: its max_position_embeddings is {longest}")
    max_positions = (config.max_model_len or default_max_model_len(longest)) + slack_rows(config, draft_path is not None, where.type == "cuda")
    model = TargetModel.from_checkpoint(checkpoint, weight_dtype, max_positions, progress, device=where, deterministic=config.deterministic)
    drafter = None
    if isinstance(draft_window, bool) or not isinstance(draft_window, int) or draft_window < 0:
        raise EagleError(f"draft_window: expected a number of tokens, or 0 for all, got {draft_window!r}")
    if draft_path is not None:
        if draft_vocab == "auto":
            draft_vocab = DEMO_DRAFT_VOCAB if draft_path == demo_drafter_path("eagle1") else None
        drafter = Drafter.from_directory(draft_path, model, max_positions=max_positions, draft_vocab=draft_vocab, layer_ids=draft_layer_ids, window=draft_window)
    return model, drafter, Tokenizer.from_checkpoint(checkpoint)


def default_max_model_len(max_position_embeddings: int) -> int:
    return min(max_position_embeddings, 8192)


def slack_rows(config: EagleConfig, speculative: bool, late: bool) -> int:
    """Rows that a step may use above the committed ones. late: the host learns one step late that a sequence has ended, so one step more may have been committed."""
    shape = tree_shape(config) if speculative else PLAIN
    return max(shape.num_nodes, shape.draft_rows, shape.max_depth + 1) + (shape.max_depth + 1 if late else 0)
