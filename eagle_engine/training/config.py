"""Settings of a training run, checked on creation."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from eagle_engine.errors import EagleError

EXPORT_DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn")
PRECISIONS = ("auto", "float32", "bfloat16")

# What was published for each version; used where the setting is left at None.
PUBLISHED = {
    1: dict(unroll_steps=1, unroll_decay=1.0, token_loss_weight=0.1, feature_loss_weight=1.0, feature_noise=0.1),
    3: dict(unroll_steps=7, unroll_decay=0.8, token_loss_weight=1.0, feature_loss_weight=0.0, feature_noise=0.0),
}


@dataclass
class TrainConfig:
    """One training run. A run directory holds everything that it makes: answers, data, states of the target, checkpoints, metrics, and in the end the drafter, its plots and its model card."""

    target: str = field(metadata={"help": "'demo', a directory, a hub id or a .gguf file"})
    out: str = field(metadata={"help": "the run directory; a run that was stopped goes on from its last checkpoint"})
    data: list[str] = field(
        default_factory=list,
        metadata={"help": "files of conversations (.jsonl, .jsonl.gz with 'messages') or of prompts that the target answers itself ('prompt', 'turns', or 'messages' that end with the user), or .npz of token ids"},
    )
    version: int = field(default=3, metadata={"help": "1: EAGLE-1 and EAGLE-2; 3: EAGLE-3"})

    num_prompts: int | None = field(default=None, metadata={"help": "most prompts to answer, taken evenly from their categories; default all"})
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.7, 1.0], metadata={"help": "of the answers, prompt by prompt in turns"})
    max_new_tokens: int = field(default=256, metadata={"help": "of an answer"})
    answer_batch_size: int = field(default=32, metadata={"help": "prompts that are answered at a time"})
    max_length: int = field(default=2048, metadata={"help": "tokens of a row; longer conversations are left out, and counted"})
    validation_share: float = field(default=0.05, metadata={"help": "of the conversations, held out"})

    draft_vocab_size: int | None = field(default=None, metadata={"help": "most frequent tokens that are drafted; default all, EAGLE-3: at most 32000"})
    hidden_size: int | None = field(default=None, metadata={"help": "of the drafter; default the target's"})
    intermediate_size: int | None = field(default=None, metadata={"help": "default the target's"})
    num_heads: int | None = field(default=None, metadata={"help": "default the target's"})
    num_kv_heads: int | None = field(default=None, metadata={"help": "default the target's"})
    captured_layers: list[int] | None = field(default=None, metadata={"help": "EAGLE-3: layers whose inputs are fused; default 2, N // 2, N - 3"})
    fc_norm: bool = field(default=False, metadata={"help": "EAGLE-3.1: normalise each captured state"})
    norm_output: bool = field(default=False, metadata={"help": "EAGLE-3.1: feed back the normalised output"})
    norm_before_residual: bool = field(default=False, metadata={"help": "EAGLE-3 variant: the residual is the normalised feature"})

    start_from: str | None = field(default=None, metadata={"help": "a drafter of the same version and sizes whose weights are the first ones"})

    unroll_steps: int | None = field(default=None, metadata={"help": "levels that the drafter is fed with its own features; default 1, EAGLE-3: 7"})
    unroll_decay: float | None = field(default=None, metadata={"help": "weight of a level against the one before; default 1, EAGLE-3: 0.8"})
    token_loss_weight: float | None = field(default=None, metadata={"help": "of the cross-entropy; default 0.1, EAGLE-3: 1"})
    feature_loss_weight: float | None = field(default=None, metadata={"help": "of the smooth L1 on features; default 1, EAGLE-3: 0"})
    feature_noise: float | None = field(default=None, metadata={"help": "half width of the uniform noise on the target's states; default 0.1, EAGLE-3: 0"})

    epochs: float = field(default=4.0, metadata={"help": "passes over the data"})
    batch_size: int = field(default=4, metadata={"help": "rows per process and backward pass"})
    gradient_accumulation: int = field(default=1, metadata={"help": "backward passes per update"})
    learning_rate: float = field(default=2e-4, metadata={"help": "at its greatest"})
    final_learning_rate: float = field(default=0.1, metadata={"help": "at the end, as a share of the greatest"})
    warmup_steps: int = field(default=100, metadata={"help": "updates until the greatest learning rate"})
    weight_decay: float = field(default=0.01, metadata={"help": "of AdamW, on matrices"})
    max_grad_norm: float = field(default=0.5, metadata={"help": "gradients are clipped to this norm"})
    precision: str = field(default="auto", metadata={"help": "of the matrix products: float32, bfloat16, or auto: bfloat16 on a GPU"})
    seed: int = field(default=0, metadata={"help": "of initialisation, order, noise and answers"})

    states: str = field(default="cached", metadata={"help": "of the target: cached (on disk, computed once) or live (computed for each batch)"})
    states_directory: str | None = field(default=None, metadata={"help": "where states are cached, so that runs on the same data can share them; default: states in the run directory"})
    states_dtype: str = field(default="bfloat16", metadata={"help": "of the cached states: bfloat16, float16 or float32"})
    target_dtype: str = field(default="auto", metadata={"help": "of the target's weights while its states are computed; auto: that of its files, bfloat16 for quantised ones"})
    export_dtype: str = field(default="float16", metadata={"help": f"of the drafter's weights: {', '.join(EXPORT_DTYPES)}"})

    checkpoint_steps: int = field(default=500, metadata={"help": "updates between checkpoints"})
    evaluate_steps: int = field(default=500, metadata={"help": "updates between evaluations of the held-out conversations"})
    log_steps: int = field(default=10, metadata={"help": "updates between lines of the metrics"})
    stop_after_minutes: float | None = field(default=None, metadata={"help": "write a checkpoint and stop after this time; the same command goes on"})
    measure_prompts: int = field(default=16, metadata={"help": "held-out prompts whose answers measure the acceptance length at the end"})
    device: str = field(default="auto", metadata={"help": "cpu, cuda or auto"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads"})

    def __post_init__(self) -> None:
        for setting, wanted in get_type_hints(TrainConfig).items():
            setattr(self, setting, _typed(setting, getattr(self, setting), wanted))
        if self.version not in PUBLISHED:
            raise EagleError(f"version: expected 1 (EAGLE-1 and EAGLE-2) or 3 (EAGLE-3), got {self.version!r}")
        for name, value in PUBLISHED[self.version].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name in ("max_new_tokens", "answer_batch_size", "unroll_steps", "batch_size", "gradient_accumulation", "checkpoint_steps", "evaluate_steps", "log_steps"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_length", self.max_length, 4)
        if not 0 <= self.seed < 1 << 32:
            raise EagleError(f"seed: expected a whole number from 0 to {(1 << 32) - 1}, got {self.seed}")
        for name in ("num_prompts", "draft_vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("epochs", "learning_rate", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise EagleError(f"{name}: expected a number above 0, got {getattr(self, name)!r}")
        for name in ("unroll_decay", "token_loss_weight", "feature_loss_weight", "feature_noise", "final_learning_rate", "weight_decay", "warmup_steps", "measure_prompts"):
            if not 0 <= getattr(self, name) < math.inf:
                raise EagleError(f"{name}: expected a number of at least 0, got {getattr(self, name)!r}")
        if not 0 < self.validation_share < 1:
            raise EagleError(f"validation_share: expected a share between 0 and 1, got {self.validation_share!r}")
        if not self.temperatures or not all(0 <= temperature < math.inf for temperature in self.temperatures):
            raise EagleError(f"temperatures: expected at least one number, none below 0, got {self.temperatures}")
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("states", self.states, ("cached", "live"))
        _one_of("states_dtype", self.states_dtype, ("bfloat16", "float16", "float32"))
        _one_of("target_dtype", self.target_dtype, ("auto", "bfloat16", "float16", "float32"))
        _one_of("export_dtype", self.export_dtype, EXPORT_DTYPES)
        if self.version == 1:
            for name in ("fc_norm", "norm_output", "norm_before_residual", "captured_layers", "hidden_size"):
                if getattr(self, name):
                    raise EagleError(f"{name} is an option of EAGLE-3 drafters, version is 1")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# Settings that a run may change when it goes on; all others decide what its checkpoints mean.
MAY_CHANGE = ("out", "data", "epochs", "answer_batch_size", "checkpoint_steps", "evaluate_steps", "log_steps", "stop_after_minutes", "measure_prompts", "device", "threads", "states", "states_directory", "num_prompts", "target")


def check_same_run(config: TrainConfig, recorded: dict[str, Any], where: Path) -> None:
    """Raise when a run directory was started with other settings. The data and the target are compared by what they hold, elsewhere; a setting that an older version
    did not have is not compared."""
    for name, value in config.to_dict().items():
        if name not in MAY_CHANGE and name in recorded and recorded[name] != json.loads(json.dumps(value)):
            raise EagleError(f"{where} was started with {name} {recorded.get(name)!r}, now it is {value!r}: give the old value, or another run directory")


def _typed(name: str, value: Any, wanted: Any) -> Any:
    """The value if it is of the type that a setting has; a whole number where a fraction may stand becomes one."""
    kinds = get_args(wanted) if get_origin(wanted) is UnionType else (wanted,)
    for kind in kinds:
        if get_origin(kind) is list and isinstance(value, (list, tuple)):
            try:
                return [_typed(name, item, get_args(kind)[0]) for item in value]
            except EagleError:
                continue
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(kind, type) and isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            return value
    raise EagleError(f"{name}: expected {' or '.join('nothing' if kind is type(None) else getattr(kind, '__name__', str(kind)) if get_origin(kind) is None else str(kind) for kind in kinds)}, got {value!r}")


def _at_least(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise EagleError(f"{name}: expected a whole number of at least {low}, got {value!r}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise EagleError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
