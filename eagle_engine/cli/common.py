"""From options to engines, parameters and token ids."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_engine.config import STATIC_CHOICES, EagleConfig
from eagle_engine.errors import EagleError
from eagle_engine.evaluation import EvalPrompt, load_prompts
from eagle_engine.sampling_params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from eagle_engine.cost_profile import CostProfile


def show_progress() -> bool:
    """Progress bars are for people: on stderr, when that is a terminal."""
    return sys.stderr.isatty()


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))


def sampling_params(args: argparse.Namespace, default_seed: int | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=default_seed if args.seed is None else args.seed,
        max_tokens=args.max_new_tokens,
        stop=args.stop,
        stop_token_ids=args.stop_token_id,
        ignore_eos=args.ignore_eos,
        structured_outputs=_structured_outputs(args),
        **{name: getattr(args, name) for name in ("n", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "logprobs") if hasattr(args, name)},
    )


def _structured_outputs(args: argparse.Namespace) -> StructuredOutputs | None:
    """What --json-schema, --regex or --grammar asks for, on commands that have them."""
    for option, field in (("json_schema", "json"), ("grammar", "grammar")):
        file = getattr(args, option, None)
        if file is not None:
            try:
                text = Path(file).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise EagleError(f"--{option.replace('_', '-')} {file}: {getattr(error, 'strerror', None) or error}") from error
            return StructuredOutputs(**{field: text})
    return StructuredOutputs(regex=args.regex) if getattr(args, "regex", None) is not None else None


def load_engine(args: argparse.Namespace, profile: CostProfile | None = None):
    """The engine that the options ask for; profile: of an adaptive tree, as for Engine."""
    for name in ("threads", "plain_threads"):
        if getattr(args, name, None) is not None and not 1 <= getattr(args, name) <= 1024:
            raise EagleError(f"--{name.replace('_', '-')}: expected a whole number from 1 to 1024, got {getattr(args, name)}")
    config = EagleConfig(
        tree=args.tree,
        top_k=args.tree_top_k,
        max_depth=args.max_depth,
        num_nodes=args.num_nodes,
        choices=STATIC_CHOICES if args.choices is None else read_choices(args.choices),
        acceptance=args.acceptance,
        max_model_len=args.max_model_len,
        max_batch_size=args.batch_size,
        deterministic=args.deterministic,
        enforce_eager=args.enforce_eager,
        enable_prefix_caching=args.prefix_caching,
    )
    from eagle_engine.engine import Engine

    return Engine.from_pretrained(
        args.target, args.draft, device=args.device, dtype=args.dtype, draft_vocab=args.draft_vocab, draft_layer_ids=args.draft_layer_ids, draft_window=args.draft_window, threads=args.threads, progress=show_progress(), config=config,
        profile=profile,
    )  # fmt: skip


def read_choices(file: str) -> tuple[tuple[int, ...], ...]:
    """The paths of a static tree; EagleConfig checks what they say."""
    try:
        return tuple(tuple(path) for path in json.loads(Path(file).expanduser().read_text(encoding="utf-8")))
    except OSError as error:
        raise EagleError(f"--choices {file}: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise EagleError(f"--choices {file}: expected a JSON list of lists of ranks, such as [[0], [1], [0, 0]] ({error})") from error


def prompt_set(args: argparse.Namespace) -> list[EvalPrompt]:
    """What --prompts or --suite names, cut at --limit."""
    return load_prompts(args.prompts or args.suite, args.limit)


def output_file(option: str, name: str, suffixes: tuple[str, ...]) -> Path:
    """The file that an option names, if it can be written: said before minutes are spent on what goes into it."""
    path = Path(name).expanduser()
    if path.suffix.lower() not in suffixes:
        raise EagleError(f"{option} {name}: expected a file that ends in {' or '.join(suffixes)}")
    if path.is_dir():
        raise EagleError(f"{option} {name}: is a directory")
    if not path.parent.is_dir():
        raise EagleError(f"{option} {name}: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise EagleError(f"{option} {name}: cannot be written")
    return path


def check_text(text: str, what: str) -> str:
    """The text, if the tokenizer can take it."""
    if not text.strip():
        raise EagleError(f"{what} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise EagleError(f"{what} is not valid Unicode: {error.reason}") from error
    return text


def encode_turns(engine, turns: list[str], *, raw: bool, system: str | None = None) -> list[int]:
    """Token ids of a conversation: user's turns with the model's answers between them. Plain text when `raw` or when the model has no chat template."""
    for turn in turns[::2]:
        check_text(turn, "the prompt")
    if raw or engine.tokenizer.chat_template is None:
        if system is not None:
            raise EagleError("--system needs a chat template: leave out --raw" if raw else "--system: this model has no chat template")
        if len(turns) > 1:
            raise EagleError("several turns need a chat template")
        return engine.tokenizer.encode(turns[0])
    roles = ("user", "assistant")
    messages = [] if system is None else [{"role": "system", "content": check_text(system, "the system message")}]
    messages += [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return engine.encode_chat(messages)


def describe_models(args: argparse.Namespace, engine) -> str:
    """One line: target, dtype, device or threads and kernels, tree."""
    import torch

    import eagle_kernels

    dtype = str(engine.models.target.dtype).removeprefix("torch.")
    if engine.models.target.device.type == "cuda":
        where = torch.cuda.get_device_name() + (", deterministic" if engine.config.deterministic else "")
    else:
        where = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} ({eagle_kernels.isa()})"
    text = f"target {args.target}, {dtype}, {where}"
    if engine.models.drafter is None:
        return text
    config, shape = engine.config, engine.models.shape
    tree = {
        "adaptive": f"adaptive tree, top_k {config.top_k}, max_depth up to {config.max_depth}, num_nodes up to {config.num_nodes}",
        "dynamic": f"dynamic tree, top_k {config.top_k}, max_depth {config.max_depth}, num_nodes {config.num_nodes}",
        "static": f"static tree, {shape.num_nodes} nodes, depth {shape.max_depth}",
        "chain": f"chain of {shape.max_depth}",
    }[config.tree]
    return f"{text}; {tree}; draft vocabulary {engine.models.drafter.vocab_size}"


def shape_name(max_depth: int, num_nodes: int) -> str:
    """One size of an adaptive tree, in a table."""
    return "plain" if num_nodes == 1 else f"depth {max_depth}, {num_nodes} nodes"


def describe_sampling(params: SamplingParams) -> str:
    if params.temperature == 0:
        return "greedy"
    options = {"top_p": (params.top_p, 1.0), "top_k": (max(params.top_k, 0), 0), "min_p": (params.min_p, 0.0)}
    extra = "".join(f", {name} {value:g}" for name, (value, off) in options.items() if value != off)
    return f"temperature {params.temperature:g}{extra}, seed {params.seed}"
