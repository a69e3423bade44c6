"""From what a caller hands over to requests: everything that can be wrong with a prompt or its parameters is found here, before anything starts."""

from __future__ import annotations

import secrets
from dataclasses import replace

from eagle_engine.errors import EagleError
from eagle_engine.logits_processing import make_processor
from eagle_engine.request import Request
from eagle_engine.sampling_params import SamplingParams
from eagle_engine.structured_outputs import Grammars
from eagle_engine.target import TargetModel
from eagle_engine.tokenizer import Tokenizer

Prompt = str | list[int]


def check_params(sampling_params: SamplingParams) -> None:
    if not isinstance(sampling_params, SamplingParams):
        raise EagleError(f"sampling_params: expected SamplingParams, got {type(sampling_params).__name__}")


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[str | None, list[int]]:
    """The text, None when there is none, and the token ids. EagleError says what is wrong with them."""
    if not isinstance(prompt, (str, list, tuple)):
        raise EagleError(f"prompt: expected a text or a list of token ids, got {type(prompt).__name__}")
    text = prompt if isinstance(prompt, str) else None
    if text is not None and tokenizer is None:
        raise EagleError("this engine has no tokenizer: give prompts as lists of token ids")
    ids = list(prompt) if text is None else tokenizer.encode(text)
    if not ids:
        raise EagleError("the prompt is empty: expected at least one token")
    bad = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size]
    if bad:
        raise EagleError(f"the prompt holds {bad[0]!r}: expected token ids from 0 to {vocab_size - 1}")
    return text, ids


def make_answers(
    request_id: int,
    text: str | None,
    prompt_ids: list[int],
    params: SamplingParams,
    limit: int,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int],
    grammars: Grammars,
    target: TargetModel,
    held: bool,
) -> list[Request]:
    """The `n` answers to one request: answer i has the seed of the first plus i. EagleError names what this vocabulary and tokenizer cannot serve."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    answers: list[Request] = []
    for index in range(params.n):
        own = params if index == 0 else replace(params, prompt_logprobs=None)  # the first answer has them for all
        wrapped = (seed + index + 2**63) % 2**64 - 2**63
        answer = Request(request_id, text, prompt_ids, own, wrapped, limit, tokenizer, eos_token_ids, held=held, index=index, answers=answers)
        answer.processor = make_processor(prompt_ids, own, target.config.vocab_size, answer.stop_token_ids, grammars, tokenizer, target.device)
        answers.append(answer)
    return answers
