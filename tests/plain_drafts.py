"""What a drafter has to draft, without asking the engine: the states of `transformers`, the published forward in float64, and every node of every observed tree held to them."""

from __future__ import annotations

import math

import pytest
import torch
from eagle_engine import SamplingParams
from eagle_engine.observation import ObservedTree
from published_drafter import PublishedDrafter
from tiny_engines import drafter_config, eagle3_config, make_drafter, make_engine, plain_tokens, random_tensors, tiny_target
from tiny_targets import random_tokens, tiny_model
from torch import Tensor

# A target of few tokens: an untrained drafter is right often enough there, and wrong often enough.
FEW = dict(vocab_size=12, num_hidden_layers=7)
BUSHY = dict(tree="dynamic", top_k=4, max_depth=4, num_nodes=14)
CONFIGS = {"eagle-1": drafter_config, "eagle-3": lambda target, **options: eagle3_config(target, draft_vocab_size=9, **options)}


def few_tokens(seed: int, count: int) -> list[int]:
    return [token % FEW["vocab_size"] for token in random_tokens(seed, count)]


class TreeRecorder:
    """An observer that keeps the trees of each request."""

    def __init__(self) -> None:
        self.trees: dict[int, list[ObservedTree]] = {}

    def __call__(self, request_ids: list[int], trees: list[ObservedTree]) -> None:
        for request_id, tree in zip(request_ids, trees, strict=True):
            self.trees.setdefault(request_id, []).append(tree)


class PlainDrafts:
    """A drafter, config.json and tensors as published, for a target of tiny_targets."""

    def __init__(self, raw: dict, tensors: dict[str, Tensor], case: str, *, window: int = 0, **options) -> None:
        self.model = tiny_model(case, **options)
        embedding, head = self.model.get_input_embeddings().weight.detach(), self.model.get_output_embeddings().weight.detach()
        self.published = PublishedDrafter(raw, tensors, embedding, head, window)
        ids = (torch.arange(len(tensors["d2t"])) + tensors["d2t"]).tolist() if "d2t" in tensors else range(len(head))
        self.draft_id = {token: i for i, token in enumerate(ids)}

    def log_probs(self, text: list[int], path: list[int]) -> Tensor:
        """Over the draft vocabulary, after a path of draft tokens behind the text, whose last token is the root."""
        with torch.no_grad():
            hidden = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states
            # hidden[i] is the input of layer i; the last one has been through the final norm.
            layers = (2, self.model.config.num_hidden_layers // 2, self.model.config.num_hidden_layers - 3) if self.published.is_eagle3 else (-1,)
            states = torch.cat([hidden[i][0] for i in layers], dim=-1)
            # Pair i: the state of token i with token i + 1. The root has no state yet.
            features = self.published.run(text[1:] + path, states[: len(text) - 1])
            return self.published.logits(features[-1:])[0].log_softmax(-1)


def check_trees(engine, plain: PlainDrafts, prompts: list[list[int]], params, *, steps: int = 100) -> tuple[list, list[ObservedTree]]:
    """Generate; in the first `steps` steps of each request the confidence of every node is the probability that the plain drafter gives it. The outputs, and the trees that were looked at."""
    recorder = TreeRecorder()
    with engine.observing(recorder):
        outputs = engine.generate(prompts, params)
    seen = []
    for prompt, output in zip(prompts, outputs, strict=True):
        text = prompt + output.token_ids
        for tree in recorder.trees[output.request_id][:steps]:
            assert tree.tokens[0] == text[tree.position]
            known: dict[tuple[int, ...], Tensor] = {}
            for node in range(1, len(tree.tokens)):
                path = path_tokens(tree, tree.parent[node])
                if path not in known:
                    known[path] = plain.log_probs(text[: tree.position + 1], list(path))
                expected = math.exp(known[path][plain.draft_id[tree.tokens[node]]])
                assert tree.confidences[node] == pytest.approx(expected, rel=1e-3), f"position {tree.position}, path {path}, token {tree.tokens[node]}"
            seen.append(tree)
    return outputs, seen


def path_tokens(tree: ObservedTree, node: int) -> tuple[int, ...]:
    """Tokens from below the root down to the node."""
    path = []
    while node > 0:
        path.append(tree.tokens[node])
        node = tree.parent[node]
    return tuple(reversed(path))


def check_shape(tree: ObservedTree) -> None:
    """A tree in which every node hangs on the root, and no parent has a token twice among its children."""
    assert (tree.parent[0], tree.depth[0]) == (-1, 0)
    for node in range(1, len(tree.tokens)):
        assert 0 <= tree.parent[node] < node and tree.depth[node] == tree.depth[tree.parent[node]] + 1, f"node {node} hangs on {tree.parent[node]}"
    children = [(tree.parent[node], tree.tokens[node]) for node in range(1, len(tree.tokens)) if tree.tokens[node] >= 0]
    assert len(set(children)) == len(children)


def drafted_plainly(make_config, prompts: list[list[int]], params: SamplingParams, case: str = "llama", *, tree: dict = BUSHY, **options) -> list:
    """Every node of every tree against the drafter run plainly, the answers against plain decoding; the trees."""
    target = tiny_target(case, **FEW)
    raw = make_config(target, **options)
    outputs, trees = check_trees(make_engine(target, make_drafter(target, raw), **tree), PlainDrafts(raw, random_tensors(raw), case, **FEW), prompts, params)
    assert [output.token_ids for output in outputs] == [plain_tokens(target, prompt, params) for prompt in prompts]
    return trees


def plain_tree(plain: PlainDrafts, text: list[int], top_k: int, max_depth: int, num_nodes: int) -> set[tuple[int, ...]]:
    """EAGLE-2's dynamic tree after a text, stated plainly: of each level's candidates the best top_k are expanded, of all candidates the best num_nodes - 1 stay. Paths of tokens."""
    tokens = {i: token for token, i in plain.draft_id.items()}
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(max_depth):
        level = {}
        for path in frontier:
            values, ids = plain.log_probs(text, list(path)).topk(top_k)
            level |= {(*path, tokens[int(i)]): scores[path] + float(value) for value, i in zip(values, ids)}
        scores |= level
        frontier = sorted(level, key=level.get, reverse=True)[:top_k]
    return set(sorted(scores, key=scores.get, reverse=True)[1:num_nodes])
