"""Tiny engines: random targets, random drafters in the published layout, and drafters that know the answer."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from eagle_engine import EagleConfig, Engine, SamplingParams
from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.cost_profile import CostProfile
from eagle_engine.drafter import Drafter
from eagle_engine.drafter_format import parse_drafter_config
from eagle_engine.step import draft
from eagle_engine.target import TargetModel
from eagle_engine.graphs import batch_buckets
from eagle_engine.tree_shape import PLAIN, tree_shapes
from eagle_kernels import DraftPool, HeadTopK, PackedWeight, logits_topk, unpack_weight
from tiny_targets import save_directory
from torch import Tensor

MAX_POSITIONS = 512
TREES = {
    "dynamic": dict(tree="dynamic", top_k=3, max_depth=4, num_nodes=10),
    "dynamic-wide": dict(tree="dynamic", top_k=5, max_depth=3, num_nodes=26),
    "static": dict(tree="static"),
    "chain": dict(tree="chain", max_depth=3),
}


@cache
def tiny_target(case: str, max_positions: int = MAX_POSITIONS, dtype: torch.dtype = torch.float32, seed: int | None = None, **options) -> TargetModel:
    """A random target of one of tiny_targets.CASES; the same object for the same arguments."""
    with tempfile.TemporaryDirectory() as directory:
        save_directory(Path(directory), case, **options)
        return TargetModel.from_checkpoint(open_checkpoint(directory), dtype, max_positions, progress=False)


def rows_weights(target: TargetModel) -> dict[str, Tensor]:
    """The weights of a target by the names of `load_weights`, as CUDA holds them: matrices as plain rows."""
    fields = [("embedding", target.embedding), ("final_norm", target.final_norm)] + ([] if target.head is target.embedding else [("head", target.head)])
    fields += [(f"layers.{i}.{field}", getattr(layer, field)) for i, layer in enumerate(target.layers) for field in type(layer).__slots__]
    return {name: unpack_weight(value) if isinstance(value, PackedWeight) else value for name, value in fields if value is not None}


def drafter_config(target: TargetModel, **options) -> dict:
    """config.json of a drafter for this target."""
    c = target.config
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": c.hidden_size, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "vocab_size": c.vocab_size,
    } | options  # fmt: skip


def random_tensors(config: dict, *, scale: float = 0.15, embeddings: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor that a drafter with this config.json must have, under the names of the published files."""
    generator = torch.Generator().manual_seed(seed)
    parsed = parse_drafter_config(config)
    shapes = parsed.expected_tensors() | ({"embed_tokens.weight": parsed.optional_tensors()["embed_tokens.weight"]} if embeddings else {})
    tensors = {name: (1.0 if "norm" in name else 0.0) + scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if parsed.has_own_vocab:
        vocab_size, draft_vocab_size = parsed.layer.vocab_size, parsed.draft_vocab_size
        ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        tensors |= {"d2t": ids - torch.arange(draft_vocab_size), "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)}
    return tensors


def random_drafter(target: TargetModel, *, draft_vocab: Tensor | None = None, **options) -> Drafter:
    return make_drafter(target, drafter_config(target, **options), draft_vocab=draft_vocab)


def eagle3_config(target: TargetModel, **options) -> dict:
    """config.json of an EAGLE-3 drafter for this target, which takes the default captured states: the target needs 7 layers."""
    return drafter_config(target) | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 57} | options


def random_eagle3(target: TargetModel, **options) -> Drafter:
    return make_drafter(target, eagle3_config(target, **options))


def make_drafter(target: TargetModel, config: dict, *, draft_vocab: Tensor | None = None, edit=None) -> Drafter:
    """edit is called with the tensors before the drafter is made of them."""
    tensors = random_tensors(config)
    if edit is not None:
        edit(tensors)
    return Drafter(parse_drafter_config(config), tensors, target, max_positions=target.max_positions, draft_vocab=draft_vocab)


# Drafters of every kind for a target of 7 layers or more.
DRAFTERS = {
    "eagle-1": random_drafter,
    "eagle-3": random_eagle3,
    "eagle-3-whole-vocabulary": lambda target: random_eagle3(target, draft_vocab_size=target.config.vocab_size),
    "eagle-3.1": lambda target: random_eagle3(target, fc_norm=True, norm_output=True, norm_before_residual=True),
    "eagle-3.1-norm-before-fc": lambda target: random_eagle3(target, norm_before_fc=True),
    "eagle-3-narrow": lambda target: random_eagle3(target, hidden_size=32, target_hidden_size=target.config.hidden_size),
}


class KnowingDrafter:
    """Stands in for a Drafter and drafts from a table instead of a model: `predict(last token, its position) -> [V] logits`.

    Its "features" carry the token and the position through the engine, so a wrong gather anywhere shows as a wrong draft.

    drafter  runs too: it writes its cache, takes its states, and drafts are from its vocabulary; None: nothing runs
    """

    def __init__(self, target: TargetModel, predict, drafter: Drafter | None = None) -> None:
        self.predict, self.drafter, self.window = predict, drafter, 0
        like = drafter or random_drafter(target)
        self.config, self.hidden_size = like.config, like.config.layer.hidden_size
        self.captured_layers, self.fuse = like.captured_layers, like.fuse
        self.vocab_size, self.draft_to_target = like.vocab_size, like.draft_to_target

    def forward(self, token_ids, features, position_ids, cache, seq_lens, page_table, packed_ancestor_mask=None, row_offset=0) -> Tensor:
        if self.drafter is None:
            out = torch.zeros(*token_ids.shape, self.hidden_size)
        else:
            out = self.drafter.forward(token_ids, features, position_ids, cache, seq_lens, page_table, packed_ancestor_mask, row_offset)
        out[..., 0], out[..., 1] = token_ids, position_ids + 1
        return out

    def store(self, token_ids, features, position_ids, cache, seq_lens, page_table) -> None:
        if self.drafter is not None:
            self.drafter.store(token_ids, features, position_ids, cache, seq_lens, page_table)

    def head_topk(self, features: Tensor, top_k: int) -> HeadTopK:
        return logits_topk(self.logits(features), top_k)

    def logits(self, features: Tensor) -> Tensor:
        rows = [self.predict(int(row[0]), int(row[1])) for row in features.reshape(-1, self.hidden_size)]
        if self.draft_to_target is not None:
            rows = [row[self.draft_to_target] for row in rows]
        return torch.stack(rows).view(*features.shape[:-1], self.vocab_size)


def oracle_drafter(target: TargetModel, text: list[int], ranks: list[int] | None = None, drafter: Drafter | None = None) -> KnowingDrafter:
    """Knows the whole text. The true next token has rank ranks[position % len(ranks)] among its drafts (default always first)."""

    def predict(_token: int, position: int) -> Tensor:
        logits = torch.linspace(0.0, 1.0, target.config.vocab_size)
        if position + 1 < len(text):
            rank = ranks[position % len(ranks)] if ranks else 0
            # `rank` other tokens stand before it.
            logits[logits.topk(rank).indices] = 9.0
            logits[text[position + 1]] = 8.0 if rank else 9.0
        return logits

    return KnowingDrafter(target, predict, drafter)


def bigram_drafter(target: TargetModel, texts: list[list[int]], drafter: Drafter | None = None) -> KnowingDrafter:
    """Drafts what followed a token somewhere in the texts: right often, not always."""
    table = torch.zeros(target.config.vocab_size, target.config.vocab_size)
    for text in texts:
        for a, b in zip(text, text[1:]):
            table[a, b] += 1.0
    return KnowingDrafter(target, lambda token, _position: table[token], drafter)


def make_engine(target: TargetModel, drafter, tokenizer=None, *, eos: tuple[int, ...] = (), profile: CostProfile | None = None, graph_api=None, **options) -> Engine:
    config = EagleConfig(**({"tree": "dynamic", "max_model_len": 200, "max_batch_size": 4, "page_size": 4} | options))
    return Engine(target, drafter, tokenizer, config, eos_token_ids=eos, graph_api=graph_api, profile=profile or made_up_profile(config))


def made_up_profile(config: EagleConfig, *, node: float = 0.04, level: float = 0.06) -> CostProfile:
    """What steps could cost: a plain step 1, each further node of a sequence and each level a little. Measured ones would be the machine's mood, with targets as tiny as these."""
    shapes, batches = tree_shapes(config), list(batch_buckets(config.max_batch_size))
    base = [[1.0 + node * (batch * shape.num_nodes - 1) + level * len(shape.levels) for batch in batches] for shape in shapes]
    return CostProfile([[shape.max_depth, shape.num_nodes] for shape in shapes], batches, base, [0.0] * len(shapes), 64)


@torch.inference_mode()
def begin_requests(engine: Engine) -> None:
    """Prefill what has been added, up to where the next step would run, and take pages for as many steps as a test may run by itself."""
    while engine.scheduler.prefill() or engine.scheduler.prefilling is not None:
        pass
    if not engine.captures_steps:
        engine._deliver(list(engine.scheduler.running), None, engine.state.outputs)
    for request in engine.scheduler.running:
        longest = engine.pages.pages_for(len(request.prompt_ids) + request.limit + engine.scheduler._step_rows)
        engine.scheduler._grow(request, longest - len(request.pages))


@torch.inference_mode()
def first_draft(engine: Engine, prompt: list[int], params: SamplingParams) -> DraftPool:
    """The pool of the first draft behind a prompt, in an engine where nothing else runs."""
    engine.add_request(prompt, params)
    begin_requests(engine)
    return draft(engine.models, engine.state, 1)[0]


def plain_tokens(target: TargetModel, prompt: list[int], params: SamplingParams, **options) -> list[int]:
    """What plain decoding answers."""
    engine = make_engine(target, None, **options)
    assert engine.models.shape is PLAIN
    return engine.generate([prompt], params)[0].token_ids
