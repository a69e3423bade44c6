"""EAGLE speculative decoding with the tokens of plain decoding."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle_engine.config import EagleConfig
    from eagle_engine.engine import Engine
    from eagle_engine.errors import EagleError
    from eagle_engine.outputs import RequestOutput, RequestStats, TextDelta
    from eagle_engine.sampling_params import SamplingParams

__all__ = ["EagleConfig", "EagleError", "Engine", "RequestOutput", "RequestStats", "SamplingParams", "TextDelta"]

# Loaded on first use, so that `eagle --help` and a mistyped option do not wait for torch.
_MODULE_OF = {
    "EagleConfig": "config",
    "EagleError": "errors",
    "Engine": "engine",
    "RequestOutput": "outputs",
    "RequestStats": "outputs",
    "SamplingParams": "sampling_params",
    "TextDelta": "outputs",
}


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
