"""eagle tree: the draft tree of one real step."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict

from eagle_engine.cli.common import describe_models, describe_sampling, encode_turns, load_engine, note, output_file, print_json, sampling_params
from eagle_engine.cli.tree_picture import drawn_tree, tree_svg, tree_text, visible
from eagle_engine.errors import EagleError
from eagle_engine.observation import ObservedTree
from eagle_engine.tokenizer import Tokenizer

CONTEXT_TOKENS = 16


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, default_seed=0)
    if args.draft == "none":
        raise EagleError("tree shows what a drafter guessed: --draft none leaves nothing to show")
    if args.step is not None and args.step < 1:
        raise EagleError(f"--step: steps are counted from 1, got {args.step}")
    out = None if args.out is None else output_file("--out", args.out, (".svg",))
    engine = load_engine(args)
    if engine.captures_steps:
        raise EagleError("tree looks into a step, and a captured one runs out of sight: add --enforce-eager")
    prompt = encode_turns(engine, [args.prompt], raw=args.raw, system=args.system)
    steps: list[ObservedTree] = []
    with engine.observing(lambda _, trees: steps.extend(trees)):
        output = engine.generate([prompt], params)[0]
    if output.error is not None:
        raise EagleError(output.error)
    number = choose_step(steps, args.step)
    tree = steps[number - 1]
    context = (prompt + output.token_ids)[: tree.position]
    texts = [token_text(engine.tokenizer, token, context[-1:] if node == 0 else [tree.tokens[tree.parent[node]]]) for node, token in enumerate(tree.tokens)]
    targets = None if tree.sampled is None else [token_text(engine.tokenizer, token, [tree.tokens[node]]) for node, token in enumerate(tree.sampled)]
    bonus = token_text(engine.tokenizer, tree.bonus_token, [tree.tokens[tree.accepted_nodes[-1]]])
    num_accepted, num_drafts = len(tree.accepted_nodes) - 1, len(tree.tokens) - 1
    heading = [
        f"step {number} of {len(steps)}: {num_accepted} of {num_drafts} drafts accepted, {num_accepted + 1} token{'s' if num_accepted else ''} emitted",
        f"{describe_models(args, engine)}; {describe_sampling(params)}",
        f"after: …{visible(engine.tokenizer.decode(context[-CONTEXT_TOKENS:], skip_special_tokens=False))}",
    ]
    nodes = drawn_tree(tree, texts, bonus, targets)
    if out is not None:
        out.write_bytes(tree_svg(nodes, heading))
        note(f"{heading[0]}; {out}")
    if args.json:
        print_json(_as_json(tree, number, len(steps), texts, bonus))
    elif out is None or args.text:
        print(tree_text(nodes, heading))
    return 0


def choose_step(steps: list[ObservedTree], number: int | None) -> int:
    """The step that was asked for, counted from 1; None: the first of those that accepted most drafts."""
    if not steps:
        raise EagleError("the answer has no step: its first token, which the prefill draws, ended it")
    if number is None:
        return 1 + max(range(len(steps)), key=lambda i: (len(steps[i].accepted_nodes), -i))
    if number > len(steps):
        raise EagleError(f"--step {number}: the answer has {len(steps)} step{'s' if len(steps) > 1 else ''}")
    return number


def token_text(tokenizer: Tokenizer, token: int, before: list[int]) -> str:
    """What a token adds to the text after `before`: alone, some tokenizers drop its space. Where it completes a character that `before` began, the text of the token alone."""
    if token < 0:
        return ""
    before = [other for other in before if other >= 0]
    head, whole = tokenizer.decode(before, skip_special_tokens=False), tokenizer.decode([*before, token], skip_special_tokens=False)
    return whole[len(head) :] if whole.startswith(head) and len(whole) > len(head) else tokenizer.decode([token], skip_special_tokens=False)


def _as_json(tree: ObservedTree, number: int, num_steps: int, texts: list[str], bonus: str) -> dict:
    # JSON has no NaN and no infinity.
    scores, confidences = ([value if math.isfinite(value) else None for value in values] for values in (tree.scores, tree.confidences))
    return {"step": number, "steps": num_steps} | asdict(tree) | {"scores": scores, "confidences": confidences, "texts": texts, "bonus_text": bonus}
