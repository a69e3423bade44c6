"""What a run ends with: the acceptance length that the engine measures, a plot, and a model card."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from eagle_engine.drafter_config import DrafterConfig
from eagle_engine.engine import Engine
from eagle_engine.sampling_params import SamplingParams
from eagle_engine.training.config import TrainConfig
from eagle_engine.training.dataset import TokenData
from eagle_engine.training.loop import Position, read_metrics

# The tree that acceptance is measured with: 16 nodes, so that figures of different runs can be compared.
MEASURED_TREE = dict(tree="dynamic", top_k=4, max_depth=5, num_nodes=16)
_MEASURED_TOKENS = 128


def measured_prompts(data: TokenData, count: int) -> list[list[int]]:
    """At most `count` different prompts of held-out conversations, drawn from all of them: files stand one after the other, often sorted by category."""
    prompts: list[list[int]] = []
    for number in np.random.default_rng(0).permutation(np.flatnonzero(data.held_out)):
        tokens, supervised = (array[data.offsets[number] : data.offsets[number + 1]] for array in (data.tokens, data.supervised))
        prompt = tokens[: int(supervised.argmax())].tolist()
        if prompt and prompt not in prompts:
            prompts.append(prompt)
        if len(prompts) == count:
            break
    return prompts


def measure_acceptance(config: TrainConfig, drafter: Path, drafter_config: DrafterConfig, data: TokenData, progress: bool) -> float | None:
    """Acceptance length of the drafter on greedy answers to held-out prompts; None when there are none to measure with."""
    prompts = measured_prompts(data, config.measure_prompts)
    if not prompts:
        return None
    longest = max(len(prompt) for prompt in prompts)
    engine = Engine.from_pretrained(
        config.target, drafter, device=config.device, threads=config.threads, draft_vocab=None, progress=progress, max_model_len=min(longest + _MEASURED_TOKENS + 1, drafter_config.layer.max_position_embeddings), **MEASURED_TREE,
    )  # fmt: skip
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=_MEASURED_TOKENS), progress=progress)
    steps = sum(output.stats.steps for output in outputs)
    emitted = sum(len(output.token_ids) - 1 for output in outputs if output.stats.steps)
    return emitted / steps if steps else None


def plot_metrics(metrics: list[dict], path: Path, title: str) -> None:
    """Loss, and acceptance by depth of the held-out conversations, over the tokens learned from; a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train = [line for line in metrics if "loss" in line]
    held_out = [line for line in metrics if "held_out" in line]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    figure.suptitle(title)
    left.plot([line["tokens"] / 1e6 for line in train], [line["token_loss"] for line in train], label="training", alpha=0.6)
    left.plot([line["tokens"] / 1e6 for line in held_out], [line["held_out"]["token_loss"] for line in held_out], label="held out", marker="o", markersize=3)
    left.set(xlabel="tokens learned from (millions)", ylabel="cross-entropy at depth 1")
    left.legend()
    for depth in range(len(held_out[0]["held_out"]["acceptance_by_depth"]) if held_out else 0):
        right.plot([line["tokens"] / 1e6 for line in held_out], [line["held_out"]["acceptance_by_depth"][depth] for line in held_out], label=f"depth {depth + 1}", marker="o", markersize=3)
    right.set(xlabel="tokens learned from (millions)", ylabel="share of drafts that are the target's choice", ylim=(0, 1))
    right.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def model_card(config: TrainConfig, drafter: DrafterConfig, data: TokenData, position: Position, covered: float, last: dict, length: float | None, size: int, left_out: dict) -> str:
    """README.md of the drafter: what it is for, what it was made from, how, and what it reached."""
    name = "EAGLE-1/2" if config.version == 1 else "EAGLE-3"
    target = "SmolLM2-135M-Instruct (the demo target)" if config.target == "demo" else Path(config.target).name
    learned = int((data.supervised & np.repeat(~data.held_out, data.lengths)).sum())
    tree = ", ".join(f"{key} {value}" for key, value in MEASURED_TREE.items() if key != "tree")
    vocab = f"draft vocabulary: {drafter.draft_vocab_size} tokens, which are {100 * covered:.1f} % of those learned from" if config.version == 3 else f"trained on the {config.draft_vocab_size or drafter.layer.vocab_size} most frequent tokens, {100 * covered:.1f} % of those learned from"
    shares = " ".join(f"{share:.3f}" for share in last["acceptance_by_depth"])
    hidden = ("target", "out", "data", "device", "threads", "stop_after_minutes", "answer_batch_size", "log_steps", "checkpoint_steps", "evaluate_steps", "measure_prompts", "states_directory")
    shown = config.to_dict() | ({"start_from": Path(config.start_from).name} if config.start_from else {})
    settings = "\n".join(f"| {key} | {value} |" for key, value in shown.items() if key not in hidden and value is not None)
    lines = [
        f"# {name} drafter for {target}", "",
        f"Published {name} layout ({config.export_dtype}, {size / 1e6:.1f} MB); embeddings are the target's. Written by `eagle train`.", "",
        "## Data", "",
        f"{len(data)} conversations, {int(data.held_out.sum())} of them held out; {learned} tokens of the assistant to learn from, {position.tokens} seen in all passes. {vocab[0].upper() + vocab[1:]}.",
        f"Files: {', '.join(Path(path).name for path in config.data)}. Conversations with a prompt of the evaluation suites (MT-bench, HumanEval, GSM8K) are left out.",
    ]  # fmt: skip
    lines += [f"{count} left out: {reason}." for reason, count in left_out.items()]
    lines += [
        "", "## What it reached", "", "| measure | figure |", "| --- | --- |",
        f"| share of drafts that are the target's choice on held-out conversations, given that those before are: depth 1, 2, ... | {shares} |",
        f"| acceptance length, engine, greedy answers to held-out prompts, dynamic tree ({tree}) | {'not measured' if length is None else f'{length:.2f}'} |",
        f"| time in the training loop | {position.seconds / 60:.0f} minutes |",
        "", "![loss and acceptance](training.png)", "", "## Settings", "", "| setting | value |", "| --- | --- |", settings, "",
    ]  # fmt: skip
    return "\n".join(lines)


def write_report(config: TrainConfig, out: Path, drafter: DrafterConfig, data: TokenData, position: Position, covered: float, progress: bool) -> float | None:
    """Measure, plot and describe the exported drafter; its acceptance length."""
    directory = out / "drafter"
    metrics = read_metrics(out / "metrics.jsonl")
    last = [line["held_out"] for line in metrics if "held_out" in line][-1]
    length = measure_acceptance(config, directory, drafter, data, progress) if config.measure_prompts else None
    plot_metrics(metrics, directory / "training.png", f"EAGLE-{'1/2' if config.version == 1 else 3} drafter")
    left_out = json.loads((out / "left_out.json").read_text())
    size = (directory / "model.safetensors").stat().st_size
    (directory / "README.md").write_text(model_card(config, drafter, data, position, covered, last, length, size, left_out), encoding="utf-8")
    return length
