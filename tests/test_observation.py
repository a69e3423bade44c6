"""An observer sees what a step did, and changes nothing."""

import math

import eagle_engine.step as step
import pytest
import torch
from eagle_engine import EagleError, SamplingParams
from eagle_engine.observation import ObservedTree, chosen_candidates
from eagle_kernels import DraftPool, rerank
from test_step_graphs import graphed
from tiny_engines import DRAFTERS, TREES, begin_requests, bigram_drafter, make_engine, plain_tokens, random_drafter, tiny_target
from tiny_targets import VOCAB_SIZE, random_tokens

SAMPLING = {"greedy": dict(temperature=0.0), "sampled": dict(temperature=0.8, top_p=0.95, seed=7)}


class Recorder:
    """An observer that keeps every tree by request."""

    def __init__(self) -> None:
        self.trees: dict[int, list[ObservedTree]] = {}

    def __call__(self, request_ids: list[int], trees: list[ObservedTree]) -> None:
        assert len(request_ids) == len(trees)
        for request_id, tree in zip(request_ids, trees):
            self.trees.setdefault(request_id, []).append(tree)


def observed(engine, prompts, params) -> tuple[list, list[list[ObservedTree]]]:
    """Outputs, and the trees of each."""
    recorder = Recorder()
    with engine.observing(recorder):
        outputs = engine.generate(prompts, params)
    assert recorder.trees.keys() <= {output.request_id for output in outputs}
    return outputs, [recorder.trees.get(output.request_id, []) for output in outputs]


def is_child_of(tree: ObservedTree, node: int, parent: int) -> bool:
    return tree.parent[node] == parent and tree.depth[node] == tree.depth[parent] + 1


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_accepted_paths_are_the_tokens_of_the_answer(tree, sampling):
    """Sequences of unequal length that come and go; more of them than slots."""
    target = tiny_target("llama")
    prompts = [random_tokens(seed, length) for seed, length in ((1, 11), (2, 1), (3, 30), (4, 5))]
    params = [SamplingParams(**SAMPLING[sampling], max_tokens=n) for n in (30, 7, 18, 25)]
    expected = [plain_tokens(target, prompt, param) for prompt, param in zip(prompts, params)]
    drafter = bigram_drafter(target, [prompt + tokens for prompt, tokens in zip(prompts, expected)])
    options = dict(max_batch_size=3, **TREES[tree])
    unobserved = make_engine(target, drafter, **options).generate(prompts, params)
    outputs, trees = observed(make_engine(target, drafter, **options), prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in unobserved] == expected
    longest = 0
    for prompt, output, of_request in zip(prompts, outputs, trees):
        assert len(of_request) == output.stats.steps
        tokens, reached = output.token_ids[:1], [0] * len(output.stats.acceptance_by_depth)
        for one in of_request:
            assert one.tokens[0] == tokens[-1] and one.position == len(prompt) + len(tokens) - 1
            path = one.accepted_nodes
            assert path[0] == 0 and all(is_child_of(one, child, parent) for parent, child in zip(path, path[1:]))
            # The walk, stated plainly: on to the child that carries the target's token, until there is none.
            node, walked = 0, [0]
            while (node := next((n for n in range(1, len(one.tokens)) if one.parent[n] == node and one.tokens[n] == one.sampled[node]), None)) is not None:
                walked.append(node)
            assert path == walked
            assert one.emitted == [one.sampled[node] for node in path] and one.bonus_token == one.sampled[path[-1]]
            kept = min(len(one.emitted), len(output.token_ids) - len(tokens))
            for depth in range(kept - 1):
                reached[depth] += 1
            tokens = tokens + one.emitted
            longest = max(longest, len(path) - 1)
        assert tokens[: len(output.token_ids)] == output.token_ids
        assert output.stats.acceptance_by_depth == [count / output.stats.steps for count in reached]
    assert longest > 1


@pytest.mark.parametrize("kind", [*DRAFTERS, "eagle-1-reduced"])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_scores_are_those_of_a_plain_run_of_the_drafter(tree, kind):
    """Every node's score is the sum of the log-probabilities along its path, the drafter run token by token behind the committed pairs."""
    target = tiny_target("llama", num_hidden_layers=7)
    drafter = random_drafter(target, draft_vocab=torch.arange(3, VOCAB_SIZE, 2)) if kind == "eagle-1-reduced" else DRAFTERS[kind](target)
    tokens = range(VOCAB_SIZE) if drafter.draft_to_target is None else drafter.draft_to_target.tolist()
    draft_id = {token: i for i, token in enumerate(tokens)}
    engine = make_engine(target, drafter, **TREES[tree])
    for seed, length in ((11, 19), (12, 4)):
        engine.add_request(random_tokens(seed, length), SamplingParams(temperature=0.0, max_tokens=20))
    begin_requests(engine)
    checked = 0
    for _ in range(3):
        names = ("page_table", "seq_lens", "num_pending", "pending_tokens", "pending_features", "draft_cache")
        before = {name: getattr(engine.state, name).clone() for name in names}
        recorder = Recorder()
        with engine.observing(recorder):
            engine.step()
        for slot, (one,) in enumerate(recorder.trees.values()):
            log_probs: dict[tuple[int, ...], torch.Tensor] = {}
            paths: list[tuple[int, ...]] = [()]
            assert one.scores[0] == 0.0
            for node in range(1, len(one.tokens)):
                path = paths[one.parent[node]]
                if path not in log_probs:
                    log_probs[path] = after_path(drafter, before, slot, path)
                expected = one.scores[one.parent[node]] + float(log_probs[path][draft_id[one.tokens[node]]])
                assert one.scores[node] == pytest.approx(expected, abs=2e-6)
                assert one.confidences[node] == pytest.approx(math.exp(float(log_probs[path][draft_id[one.tokens[node]]])), rel=1e-5)
                assert one.path_confidences[node] == pytest.approx(math.exp(one.scores[node]))
                paths.append((*path, one.tokens[node]))
                checked += 1
    assert checked == 6 * (engine.models.shape.num_nodes - 1)


@torch.inference_mode()
def after_path(drafter, state: dict[str, torch.Tensor], slot: int, path: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [draft vocabulary] after the pending pairs of a slot and a path of draft tokens, one forward per token."""
    cache, page_table = state["draft_cache"][0].clone(), state["page_table"][slot : slot + 1]
    pending = int(state["num_pending"][slot])
    length = int(state["seq_lens"][slot]) - pending
    for i, token in enumerate([*state["pending_tokens"][slot, :pending].tolist(), *path]):
        pair = drafter.fuse(state["pending_features"][slot, i][None, None]) if i < pending else feature
        lens = torch.tensor([length + i], dtype=torch.int32)
        feature = drafter.forward(torch.tensor([[token]]), pair, torch.tensor([[length + i]]), cache, lens, page_table)
    return drafter.logits(feature)[0, 0].double().log_softmax(-1)


@pytest.mark.parametrize("tree", ["static", "chain"])
def test_rejection_sampling_is_observed_too(tree):
    """Its drafts are drawn: their confidence is the probability they were drawn with, and the target chooses no token per node."""
    target = tiny_target("llama")
    prompts = [random_tokens(21, 9), random_tokens(22, 3)]
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=25)
    drafter = bigram_drafter(target, [prompt + plain_tokens(target, prompt, params) for prompt in prompts])
    options = dict(acceptance="rejection", **TREES[tree])
    unobserved = make_engine(target, drafter, **options).generate(prompts, params)
    outputs, trees = observed(make_engine(target, drafter, **options), prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in unobserved]
    for output, of_request in zip(outputs, trees):
        tokens = output.token_ids[:1]
        for one in of_request:
            assert one.sampled is None
            tokens = tokens + one.emitted
            for node in range(1, len(one.tokens)):
                probs = (drafter.predict(one.tokens[one.parent[node]], 0) / 0.9).softmax(-1)
                assert one.confidences[node] == pytest.approx(float(probs[one.tokens[node]]), rel=1e-4)
        assert tokens[: len(output.token_ids)] == output.token_ids


def test_chosen_candidates_are_those_of_rerank():
    """With ties, NaN and -inf among the scores."""
    batch, size = 20, 30
    scores = torch.randint(-4, 1, (batch, size)).float()
    scores[torch.rand(batch, size) < 0.1] = float("nan")
    scores[torch.rand(batch, size) < 0.1] = float("-inf")
    pool = DraftPool(torch.arange(size).expand(batch, -1).contiguous(), scores, torch.full((batch, size), -1, dtype=torch.int32))
    for num_nodes in (2, 11, size + 1):
        tree = rerank(pool, torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int32), num_nodes)
        assert torch.equal(chosen_candidates(pool, num_nodes, None), tree.tokens[:, 1:])


def test_confidence_of_paths_without_probability():
    infinite = -math.inf
    tree = ObservedTree([5, 6, 7, -1, 8], [-1, 0, 1, 2, 0], [0, 1, 2, 3, 1], [0.0, -1.0, infinite, infinite, math.nan], [0] * 5, [0], 9, 3)
    first, confidence, nothing, below_nothing, unknown = tree.confidences
    assert (first, confidence, nothing) == (1.0, pytest.approx(math.exp(-1.0)), 0.0)
    assert math.isnan(below_nothing) and math.isnan(unknown)


def test_a_drafter_of_nan_is_observed():
    target = tiny_target("llama")
    drafter = bigram_drafter(target, [])
    drafter.predict = lambda _token, _position: torch.full((target.config.vocab_size,), float("nan"))
    prompt, params = random_tokens(5, 6), SamplingParams(temperature=0.0, max_tokens=8)
    (output,), (trees,) = observed(make_engine(target, drafter, **TREES["dynamic"]), [prompt], params)
    assert output.token_ids == plain_tokens(target, prompt, params) and len(trees) == output.stats.steps > 0


def test_plain_decoding_has_trees_of_a_root():
    (output,), (trees,) = observed(make_engine(tiny_target("llama"), None), [random_tokens(6, 6)], SamplingParams(temperature=0.0, max_tokens=5))
    assert [tree.emitted for tree in trees] == [[token] for token in output.token_ids[1:]]
    assert all((tree.parent, tree.scores, tree.accepted_nodes) == ([-1], [0.0], [0]) for tree in trees)


def test_nothing_is_made_for_an_observer_that_is_not_there(monkeypatch):
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), **TREES["dynamic"])
    recorder = Recorder()
    prompt, params = random_tokens(7, 6), SamplingParams(temperature=0.0, max_tokens=5)
    with pytest.raises(ZeroDivisionError), engine.observing(recorder):
        engine.generate([prompt], params)
        1 / 0
    seen = sum(map(len, recorder.trees.values()))

    def never(*_):
        raise AssertionError("trees were made without an observer")

    monkeypatch.setattr(step, "observed_trees", never)
    engine.generate([prompt], params)
    assert sum(map(len, recorder.trees.values())) == seen > 0
    with pytest.raises(AssertionError, match="without an observer"), engine.observing(recorder):
        engine.generate([prompt], params)


def test_captured_steps_cannot_be_observed():
    target = tiny_target("llama")
    engine, _ = graphed(target, random_drafter(target))
    assert engine.captures_steps and not make_engine(target, None).captures_steps
    with pytest.raises(EagleError, match="--enforce-eager"), engine.observing(Recorder()):
        raise AssertionError("the block must not run")
