"""eagle verify: are the tokens of speculative decoding those of plain decoding?"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass

import torch
from tqdm import tqdm

from eagle_engine.cli.common import describe_models, describe_sampling, encode_turns, load_engine, note, print_json, prompt_set, sampling_params, show_progress
from eagle_engine.engine import Engine
from eagle_engine.errors import EagleError
from eagle_engine.evaluation import EvalPrompt
from eagle_engine.kv_cache import make_kv_cache
from eagle_engine.outputs import RequestOutput
from eagle_engine.sampling_params import SamplingParams
from eagle_engine.target import TargetModel


@dataclass
class Difference:
    """Where two answers part.

    id                  of the prompt
    turn                counted from 1
    position            first differing token of the answer, counted from 0
    plain, speculative  the two tokens; None: that answer had ended
    margin              logit of the plain token minus logit of the speculative one, from the target on the common prefix; None without two tokens
    plain_finish_reason, speculative_finish_reason   why the answers ended
    """

    id: str
    turn: int
    position: int
    plain: int | None
    speculative: int | None
    margin: float | None
    plain_finish_reason: str
    speculative_finish_reason: str


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, default_seed=0)
    if args.draft == "none":
        raise EagleError("verify compares plain with speculative decoding: --draft none leaves nothing to compare")
    if args.acceptance == "rejection" and params.temperature > 0:
        raise EagleError("acceptance 'rejection' keeps the distribution of plain decoding, not its tokens: verify at temperature 0, or with --acceptance exact")
    prompts = prompt_set(args)
    engine = load_engine(args)
    plain_engine = engine.plain()
    note(f"{describe_models(args, engine)}; {describe_sampling(params)}")
    threads = torch.get_num_threads(), args.plain_threads or torch.get_num_threads()
    started = time.perf_counter()
    differences: list[Difference] = []
    failures: list[tuple[str, int, str]] = []
    total = 0
    conversations = {index: [prompt.turns[0]] for index, prompt in enumerate(prompts)}
    turn = 1
    while conversations:
        encoded = {index: encode_turns(engine, turns, raw=args.raw, system=args.system) for index, turns in conversations.items()}
        plain, speculative = _answers(engine, plain_engine, list(encoded.values()), params, threads)
        for index, ours, theirs in zip(encoded, plain, speculative):
            total += 1
            conversations[index].append(ours.text)
            error = ours.error or theirs.error
            if error is not None:
                failures.append((prompts[index].id, turn, error))
            elif (ours.token_ids, ours.text, ours.finish_reason) != (theirs.token_ids, theirs.text, theirs.finish_reason):
                differences.append(_difference(engine.models.target, prompts[index], turn, ours, theirs))
        conversations = _next_turn(args, prompts, conversations, turn, {index for index, output in zip(encoded, plain) if output.error is None})
        turn += 1
    torch.set_num_threads(threads[0])
    return _report(args, engine, differences, failures, total, time.perf_counter() - started)


def _answers(engine: Engine, plain_engine: Engine, prompts: list[list[int]], params: SamplingParams, threads: tuple[int, int]) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Plain decoding one prompt at a time; speculative decoding as the engine batches."""
    torch.set_num_threads(threads[1])
    plain = [plain_engine.generate([prompt], params)[0] for prompt in tqdm(prompts, desc="plain", unit="prompt", disable=not show_progress(), leave=False)]
    torch.set_num_threads(threads[0])
    return plain, engine.generate(prompts, params, progress=show_progress())


def _next_turn(args: argparse.Namespace, prompts: list[EvalPrompt], conversations: dict[int, list[str]], turn: int, answered: set[int]) -> dict[int, list[str]]:
    """The conversations that have a further turn, that turn added."""
    if args.turns == "first":
        return {}
    return {index: [*turns, prompts[index].turns[turn]] for index, turns in conversations.items() if index in answered and turn < len(prompts[index].turns)}


def _difference(target: TargetModel, prompt: EvalPrompt, turn: int, plain: RequestOutput, speculative: RequestOutput) -> Difference:
    position = next((i for i, (a, b) in enumerate(zip(plain.token_ids, speculative.token_ids)) if a != b), min(len(plain.token_ids), len(speculative.token_ids)))
    first, second = (output.token_ids[position] if position < len(output.token_ids) else None for output in (plain, speculative))
    margin = None
    if first is not None and second is not None:
        logits = logits_after(target, plain.prompt_token_ids + plain.token_ids[:position])
        margin = float(logits[first] - logits[second])
        margin = margin if math.isfinite(margin) else None
    return Difference(prompt.id, turn, position, first, second, margin, plain.finish_reason, speculative.finish_reason)


@torch.inference_mode()
def logits_after(target: TargetModel, token_ids: list[int], chunk: int = 256, page_size: int = 16) -> torch.Tensor:
    """The target's logits [V] after a sequence, from a prefill into a cache of its own."""
    config = target.config
    pages = -(-len(token_ids) // page_size)
    device = target.device
    cache = make_kv_cache(config.num_layers, pages, page_size, config.num_kv_heads, config.head_dim, target.activation_dtype, device)
    page_table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    for start in range(0, len(token_ids), chunk):
        tokens = torch.tensor([token_ids[start : start + chunk]], device=device)
        position_ids = torch.arange(start, start + tokens.shape[1], device=device)[None]
        features = target.forward(tokens, position_ids, cache, torch.tensor([start], dtype=torch.int32, device=device), page_table)
    return target.logits(features[0, -1:])[0]


def _report(args: argparse.Namespace, engine: Engine, differences: list[Difference], failures: list[tuple[str, int, str]], total: int, seconds: float) -> int:
    identical = total - len(differences) - len(failures)
    for name, turn, error in failures:
        note(f"eagle: error: prompt {name}{_turn(args, turn)}: {error}")
    if args.json:
        errors = [{"id": name, "turn": turn, "error": error} for name, turn, error in failures]
        print_json({"identical": identical, "total": total, "differences": [asdict(difference) for difference in differences], "errors": errors, "seconds": seconds})
    else:
        for difference in differences:
            margin = "" if difference.margin is None else f", logit margin {difference.margin:.3g}"
            plain, speculative = (
                f"ended ({reason})" if token is None else f"{token} {engine.tokenizer.decode([token], skip_special_tokens=False)!r}"
                for token, reason in ((difference.plain, difference.plain_finish_reason), (difference.speculative, difference.speculative_finish_reason))
            )
            print(f"prompt {difference.id}{_turn(args, difference.turn)}, token {difference.position}: plain {plain}, speculative {speculative}{margin}")
        print(f"{identical}/{total} identical")
    return 2 if failures else 1 if differences else 0


def _turn(args: argparse.Namespace, turn: int) -> str:
    return f" turn {turn}" if args.turns == "all" else ""
