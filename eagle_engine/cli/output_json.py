"""A request's output as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from eagle_engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs


def output_as_json(output: RequestOutput) -> dict[str, Any]:
    """The first answer's fields beside those of the request; all answers under "answers" when there are several."""
    request = {"request_id": output.request_id, "prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids}
    answers = [_answer(answer) for answer in output.outputs]
    return request | answers[0] | ({"answers": answers} if len(answers) > 1 else {})


def _answer(answer: CompletionOutput) -> dict[str, Any]:
    fields = asdict(replace(answer, logprobs=None))
    if answer.logprobs is None:
        del fields["logprobs"], fields["cumulative_logprob"]
    else:
        fields["logprobs"] = [_place(place) for place in answer.logprobs]
        fields["cumulative_logprob"] = _finite(answer.cumulative_logprob)
    return fields


def _place(place: TokenLogprobs) -> list[dict[str, Any]]:
    """The token that was drawn, then the most likely ones."""
    return [{"token_id": token, "token": of.decoded_token, "logprob": _finite(of.logprob), "rank": of.rank} for token, of in place.items()]


def _finite(value: float) -> float | None:
    """JSON has no infinity: a token that cannot be has null."""
    return value if math.isfinite(value) else None
