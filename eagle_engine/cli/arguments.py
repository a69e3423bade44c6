"""Options of every command. Nothing here imports torch: help and mistakes answer at once."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

from eagle_engine.config import ACCEPTANCE_RULES, ADAPTIVE_SIZE, FIXED_SIZE, TREES, EagleConfig
from eagle_engine.drafter_config import LAYER_ID_CONVENTIONS
from eagle_engine.errors import EagleError
from eagle_engine.evaluation import SUITES
from eagle_engine.training.config import TrainConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
DEFAULTS = EagleConfig()
EXAMPLE_PROMPT = "Explain in a few sentences how a bicycle stays upright."


class Parser(argparse.ArgumentParser):
    """A mistake is an EagleError, which `main` prints in one line."""

    def error(self, message: str):
        raise EagleError(f"{message} (see {self.prog} --help)")


class ShowVersion(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"eagle-engine {version('eagle-engine')}")
        except PackageNotFoundError:
            print("eagle-engine (run from a source tree that is not installed)")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="eagle", description="EAGLE speculative decoding whose tokens are those of plain decoding.", allow_abbrev=False)
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, help: str, description: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=description, allow_abbrev=False)
        sub.set_defaults(module=name)
        sub.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")
        return sub

    sub = command("generate", "answer prompts", "Answer one prompt, streaming, or several at once.")
    sub.add_argument("prompt", nargs="*", help="prompts; without any, and without --prompts or --suite, one prompt is read from stdin")
    _prompt_set(sub, required=False)
    _prompt_form(sub)
    _models(sub)
    _tree(sub)
    _sampling(sub, max_tokens=256)
    _answers(sub)

    sub = command("chat", "talk with the model", "A conversation. /reset forgets it, /exit or end of input leaves; Ctrl-C stops an answer.")
    sub.add_argument("--system", metavar="TEXT", help="system message")
    _models(sub, batch=None)
    _tree(sub)
    _sampling(sub, max_tokens=512)

    sub = command(
        "verify",
        "compare plain with speculative decoding",
        "Answer every prompt with plain decoding, one at a time, and with speculative decoding; report each difference with the logit margin between the two tokens. Exit status 1 when any differ.",
    )
    _prompt_set(sub)
    _prompt_form(sub)
    turns = "answer the first turn of each prompt, or all of them, the conversation following the plain answers (default: %(default)s)"
    sub.add_argument("--turns", choices=("first", "all"), default="first", help=turns)
    sub.add_argument("--plain-threads", type=int, metavar="N", help="threads for plain decoding (default: those of --threads)")
    _models(sub)
    _tree(sub)
    _sampling(sub, max_tokens=128, seed="0")

    sub = command(
        "bench",
        "measure plain and speculative decoding",
        "Answer the first turn of each prompt with plain and with speculative decoding in turns, after a warm-up prompt; over all prompts and by category. Times are those of whole answers, prefill included.",
    )
    _prompt_set(sub, default="mt_bench", limit=8)
    _prompt_form(sub)
    sub.add_argument("--baseline", choices=("transformers",), help="also measure greedy generate of transformers: same weights, dtype, prompts and number of tokens, in a process of its own")
    group = sub.add_argument_group("the drafter's confidence")
    calibration = "answer the prompts once more, not timed, and compare the drafter's confidence in each draft with how often the target chooses it: by confidence and by depth, with their correlation"
    group.add_argument("--calibration", action="store_true", help=calibration)
    group.add_argument("--plot", metavar="FILE", help="draw that to a .png or .svg file (implies --calibration; needs matplotlib)")
    _models(sub, prefix_caching=False)  # every prompt is to cost what it costs alone
    _tree(sub)
    _sampling(sub, max_tokens=128, seed="0")

    sub = command(
        "tree",
        "show the draft tree of a step",
        "Answer a prompt and show the draft tree of one of its steps: every guess with the drafter's confidence in it, the accepted path and the bonus token; as text, or as a picture with --out.",
    )
    sub.add_argument("--prompt", metavar="TEXT", default=EXAMPLE_PROMPT, help="default: %(default)s")
    step = "which step, counted from 1 (default: of those of the whole answer the one that accepted most drafts, the first of several)"
    sub.add_argument("--step", type=int, metavar="K", help=step)
    sub.add_argument("--out", metavar="FILE.svg", help="write a picture instead of printing text")
    sub.add_argument("--text", action="store_true", help="print text too when --out is given")
    _prompt_form(sub)
    _models(sub, batch=None)
    _tree(sub, default="dynamic")  # an adaptive one may be plain decoding, which shows nothing
    _sampling(sub, max_tokens=64, seed="0")

    sub = command(
        "tune",
        "measure what the steps of an adaptive tree cost here",
        "Measure what a step costs on this machine for each tree that an adaptive one may become, and keep it, in place of what was measured before: for engines of the same models, settings, threads and batch size.",
    )
    _models(sub, batch=DEFAULTS.max_batch_size)
    _adaptive_tree(sub)

    sub = command(
        "profile",
        "show where the time of a step goes and why it has its tree",
        "Answer the first turn of each prompt with an adaptive tree. Show where the time of a step goes, for each tree and phase, against what the machine allows: the bytes that must be read over the read "
        "bandwidth, or the multiply-adds over their rate, both measured in the same run. Then what was compared when the last tree was chosen, and what the drafts have brought.",
    )
    _prompt_set(sub, default="mt_bench", limit=4)
    _prompt_form(sub)
    _models(sub)
    _adaptive_tree(sub)
    _sampling(sub, max_tokens=64, seed="0")

    sub = command(
        "inspect",
        "show what is in a target and a drafter",
        "Show what is in a target and a drafter, and whether the two fit. Only headers of the target are read. Exit status 1 when they do not fit.",
    )
    sub.add_argument("--target", default="demo", metavar="MODEL", help="as for generate, or none (default: %(default)s)")
    sub.add_argument("--draft", default="auto", metavar="DRAFTER", help="a drafter directory, a hub id, none, or auto: the demo's with the demo target, else none (default: %(default)s)")
    _layer_ids(sub)

    sub = command(
        "train",
        "make a drafter for a target",
        "Train an EAGLE-1/2 or EAGLE-3 drafter: let the target answer prompts, take its states, train, export, measure. A run that was stopped goes on when the same command is given again. "
        "Exit status 1 when the drafter is useless, 3 when the run stopped before its end.",
    )
    _train(sub)

    command("fetch", "download the demo target", "Download the demo target (SmolLM2-135M-Instruct, 98 MB), check it, print where it is.")

    sub = command("demo", "plain and speculative decoding side by side", "Answer one prompt with plain and with speculative decoding, and compare. Exit status 1 when the tokens differ.")
    sub.add_argument("prompt", nargs="?", default=EXAMPLE_PROMPT, help="default: %(default)s")
    sub.set_defaults(raw=False, system=None, baseline=None)
    _models(sub, batch=None)
    _tree(sub)
    _sampling(sub, max_tokens=128, seed="0")
    return parser


def _prompt_set(sub: argparse.ArgumentParser, required: bool = True, default: str | None = None, limit: int | None = None) -> None:
    group = sub.add_argument_group("prompts")
    source = group.add_mutually_exclusive_group(required=required and default is None)
    source.add_argument("--prompts", metavar="FILE", help='JSON lines: {"id": ..., "turns": ["...", ...]} or {"prompt": "..."}')
    source.add_argument("--suite", choices=SUITES, default=default, help=f"prompts that ship with the package{f' (default: {default})' if default else ''}")
    group.add_argument("--limit", type=int, default=limit, metavar="N", help=f"only the first N prompts (default: {limit or 'all'})")


def _prompt_form(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("form of the prompts")
    group.add_argument("--raw", action="store_true", help="take prompts as plain text, without the model's chat template")
    group.add_argument("--system", metavar="TEXT", help="system message for the chat template")


def _models(sub: argparse.ArgumentParser, batch: int | None = 1, prefix_caching: bool = True) -> None:
    """batch: prompts that are answered together unless the user says so; None: one, and no option."""
    group = sub.add_argument_group("models")
    group.add_argument("--target", default="demo", metavar="MODEL", help="demo, a Hugging Face directory, a .gguf file or a hub id (default: %(default)s)")
    group.add_argument("--draft", default="auto", metavar="DRAFTER", help="a drafter directory, a hub id, none (plain decoding), eagle1 or eagle3: those of the demo target, or auto: the demo's faster one (default: %(default)s)")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights; auto: float32 for float32 checkpoints on the CPU, float16 for float16 ones on CUDA, else bfloat16")
    group.add_argument("--device", choices=DEVICES, default="auto", help="auto: CUDA where there is a GPU (default: %(default)s)")
    group.add_argument("--deterministic", action="store_true", help="CUDA: kernels whose results do not depend on the number of rows, so that the tokens are those of plain decoding bit for bit; the CPU has no others")
    group.add_argument("--enforce-eager", action="store_true", help="run every step from Python instead of replaying a recording or a captured graph")
    vocab = "draft only the N most frequent tokens, or those in a file; all; auto: the most frequent for the demo's drafter, else all"
    group.add_argument("--draft-vocab", type=_draft_vocab, default="auto", metavar="N|FILE|all", help=vocab)
    _layer_ids(group)
    group.add_argument("--draft-window", type=int, default=0, metavar="N", help="tokens that the drafter's attention reaches back, for texts longer than those it was trained on; 0: all (default)")
    group.add_argument("--threads", type=int, metavar="N", help="default: one for each core")
    group.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer together (default: what the model was made for, at most 8192)")
    caching = "find the rows of a beginning that earlier prompts had too, instead of computing them anew (default: %(default)s)"
    group.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=prefix_caching, help=caching)
    if batch is not None:
        group.add_argument("--batch-size", type=int, default=batch, metavar="N", help="prompts that are answered together (default: %(default)s)")
    else:
        sub.set_defaults(batch_size=1)


def _layer_ids(group) -> None:
    text = "what the captured layers' ids of an EAGLE-3 drafter count where its config.json lists some and does not say: inputs of those layers (vLLM) or outputs (SGLang)"
    group.add_argument("--draft-layer-ids", choices=LAYER_ID_CONVENTIONS, help=text)


def _tree(sub: argparse.ArgumentParser, default: str = DEFAULTS.tree) -> None:
    group = sub.add_argument_group("draft tree")
    group.add_argument("--tree", choices=TREES, default=default, help="adaptive: shaped by the drafter's confidence (EAGLE-2), and sized step by step by what pays; dynamic: of one size; static: a fixed shape (EAGLE-1); chain (default: %(default)s)")
    group.add_argument("--tree-top-k", type=int, metavar="N", help=f"adaptive and dynamic tree: continuations of a node, and nodes expanded per level (default: {DEFAULTS.top_k}; dynamic: {FIXED_SIZE['top_k']})")
    group.add_argument("--max-depth", type=int, metavar="N", help=f"greatest depth of a node (default: {DEFAULTS.max_depth}; dynamic: {FIXED_SIZE['max_depth']})")
    group.add_argument("--num-nodes", type=int, metavar="N", help=f"nodes of a dynamic tree, most nodes of an adaptive one, the root included (default: {DEFAULTS.num_nodes}; dynamic: {FIXED_SIZE['num_nodes']})")
    group.add_argument("--choices", metavar="FILE", help="static tree: JSON list of paths of ranks, such as [[0], [1], [0, 0]] (default: a small built-in tree)")
    rule = "exact: the tokens of plain decoding; rejection: its distribution, for chains and static trees (default: %(default)s)"
    group.add_argument("--acceptance", choices=ACCEPTANCE_RULES, default=DEFAULTS.acceptance, help=rule)


def _adaptive_tree(sub: argparse.ArgumentParser) -> None:
    """Sizes alone, for commands about adaptive trees."""
    group, size = sub.add_argument_group("adaptive tree"), ADAPTIVE_SIZE
    group.add_argument("--tree-top-k", type=int, metavar="N", help=f"continuations of a node, and nodes expanded per level (default: {size['top_k']})")
    group.add_argument("--max-depth", type=int, metavar="N", help=f"greatest depth of a node (default: {size['max_depth']})")
    group.add_argument("--num-nodes", type=int, metavar="N", help=f"most nodes, the root included (default: {size['num_nodes']})")
    sub.set_defaults(tree="adaptive", choices=None, acceptance=DEFAULTS.acceptance)


def _sampling(sub: argparse.ArgumentParser, max_tokens: int, seed: str = "a fresh one per prompt") -> None:
    group = sub.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default: 0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off (default)")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="0: off (default)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off (default)")
    group.add_argument("--seed", type=int, metavar="N", help=f"default: {seed}")
    group.add_argument("--max-new-tokens", type=int, default=max_tokens, metavar="N", help="most tokens of an answer (default: %(default)s)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text; may be given several times")
    group.add_argument("--stop-token-id", action="append", type=int, default=[], metavar="ID", help="end the answer at this token; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end tokens")


def _answers(sub: argparse.ArgumentParser) -> None:
    """What `generate` has of sampling parameters beyond those of every command."""
    group = sub.add_argument_group("form and number of the answers")
    group.add_argument("--n", type=int, default=1, metavar="N", help="answers to each prompt, the next one with the next seed (default: %(default)s)")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="logits of tokens that the prompt or the answer has: divided by R above 0, multiplied below; 1: off (default)")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="P", help="taken from the logits of tokens that the answer has, -2 to 2; 0: off (default)")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="P", help="taken from them for each time that the answer has them, -2 to 2; 0: off (default)")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no end before so many tokens (default: %(default)s)")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="the answer is JSON of this schema")
    form.add_argument("--regex", metavar="REGEX", help="the answer matches this regular expression as a whole")
    form.add_argument("--grammar", metavar="FILE", help="the answer is of this grammar: Lark (start: ...) or GBNF (root ::= ...)")
    group.add_argument("--logprobs", type=int, metavar="N", help="with --json: the log-probability of each token and of the N most likely ones, 0 to 20")


def _train(sub: argparse.ArgumentParser) -> None:
    """One option for each setting of a training run. An option that is not given is absent, so that a file of settings shows through."""
    sub.add_argument("--config", metavar="FILE", help="settings as .toml or .json; options win over it")
    hints = get_type_hints(TrainConfig)
    for setting in dataclasses.fields(TrainConfig):
        option, kind = "--" + setting.name.replace("_", "-"), hints[setting.name]
        kinds = [one for one in get_args(kind) if one is not type(None)] if get_origin(kind) is UnionType else [kind]
        help = setting.metadata["help"]
        if setting.default is not dataclasses.MISSING and setting.default is not None and setting.default is not False:
            help += f" (default: {setting.default})"
        options = {"help": help, "default": argparse.SUPPRESS, "dest": f"train_{setting.name}"}
        if kinds[0] is bool:
            sub.add_argument(option, action=argparse.BooleanOptionalAction, **options)
        elif get_origin(kinds[0]) is list:
            sub.add_argument(option, nargs="+", type=get_args(kinds[0])[0], metavar=setting.name.rstrip("s").upper(), **options)
        else:
            sub.add_argument(option, type=kinds[0], metavar={int: "N", float: "X", str: "NAME"}[kinds[0]], **options)


def _draft_vocab(text: str) -> int | str | Path | None:
    if text == "all":
        return None
    if text == "auto":
        return text
    return int(text) if text.isascii() and text.isdigit() else Path(text)
