"""EAGLE speculative decoding with the tokens of plain decoding."""

from eagle_engine.config import EagleConfig
from eagle_engine.engine import Engine
from eagle_engine.errors import EagleError
from eagle_engine.outputs import RequestOutput, RequestStats, TextDelta
from eagle_engine.sampling_params import SamplingParams

__all__ = ["EagleConfig", "EagleError", "Engine", "RequestOutput", "RequestStats", "SamplingParams", "TextDelta"]
