"""EAGLE speculative decoding with the tokens of plain decoding."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle_engine.config import EagleConfig
    from eagle_engine.engine import Engine
    from eagle_engine.errors import EagleError
    from eagle_engine.outputs import CompletionOutput, Logprob, RequestOutput, RequestStats, TextDelta
    from eagle_engine.sampling_params import SamplingParams, StructuredOutputs

__all__ = ["CompletionOutput", "EagleConfig", "EagleError", "Engine", "Logprob", "RequestOutput", "RequestStats", "SamplingParams", "StructuredOutputs", "TextDelta"]

# Loaded on first use, so that `eagle --help` and a mistyped option do not wait for torch.
_MODULE_OF = {
    "CompletionOutput": "outputs",
    "EagleConfig": "config",
    "EagleError": "errors",
    "Engine": "engine",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "RequestStats": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutputs": "sampling_params",
    "TextDelta": "outputs",
}


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
