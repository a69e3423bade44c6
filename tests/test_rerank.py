"""rerank against its reference, and the properties of every tree."""

import pytest
import torch
from eagle_kernels import DraftPool, expand, reference, rerank
from helpers import assert_bad_tensors_refused, assert_exact, assert_refused, depths, packed_mask, path_to_root
from hypothesis import given
from hypothesis import strategies as st


def make_pool(batch: int, pool_size: int, kind: str) -> DraftPool:
    """Any pool whose scores do not rise from parent to child; parents lie before their children."""
    parents = torch.stack([torch.randint(-1, max(slot, 1), (batch,)) if slot else torch.full((batch,), -1) for slot in range(pool_size)], 1)
    scores = torch.zeros(batch, pool_size)
    for slot in range(pool_size):
        parent = parents[:, slot]
        parent_score = torch.where(parent >= 0, scores.gather(1, parent.clamp(min=0)[:, None])[:, 0], 0.0)
        step = torch.rand(batch) * 2
        scores[:, slot] = parent_score - {"random": step, "ties": step.round(), "equal": 0 * step, "infinite": torch.where(step < 0.5, torch.inf, step)}[kind]
    if kind == "infinite":
        scores = torch.where(scores == -torch.inf, torch.tensor([-torch.inf, torch.nan])[torch.randint(0, 2, scores.shape)], scores)
    return DraftPool(torch.randint(0, 1000, (batch, pool_size)), scores, parents.int())


def check_tree(tree: tuple[torch.Tensor, ...], root_tokens: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """What holds for every tree, without an oracle."""
    tokens, parent, depth, mask, position_ids = tree
    assert_exact(tokens[:, 0], root_tokens)
    for b in range(tokens.shape[0]):
        parents = parent[b].tolist()
        assert parents[0] == -1 and all(0 <= parents[i] < i for i in range(1, len(parents)))
        assert depth[b].tolist() == depths(parents)
    assert_exact(mask, packed_mask(parent))
    assert_exact(position_ids, seq_lens[:, None].long() + depth.long())


def check(pool: DraftPool, num_nodes: int, choices: torch.Tensor | None = None) -> None:
    batch = pool.tokens.shape[0]
    root_tokens, seq_lens = torch.randint(0, 1000, (batch,)), torch.randint(0, 5000, (batch,), dtype=torch.int32)
    before = [tensor.clone() for tensor in pool]
    tree = rerank(pool, root_tokens, seq_lens, num_nodes, choices=choices)
    for tensor, expected in zip(tree, reference.rerank(pool, root_tokens, seq_lens, num_nodes, choices=choices)):
        assert_exact(tensor, expected)
    check_tree(tree, root_tokens, seq_lens)
    for tensor, expected in zip(pool, before):
        assert_exact(tensor, expected)


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "infinite"])
@pytest.mark.parametrize("batch, pool_size, num_nodes", [(1, 1, 1), (2, 1, 2), (3, 10, 6), (2, 110, 26), (2, 63, 64), (1, 510, 65), (1, 300, 256), (1, 255, 256)])
def test_matches_reference(batch: int, pool_size: int, num_nodes: int, kind: str, isa: str) -> None:
    check(make_pool(batch, pool_size, kind), num_nodes)


@given(data=st.data(), size=st.integers(1, 40))
def test_any_pool(isa: str, data: st.DataObject, size: int) -> None:
    parents, scores = [], []
    for slot in range(size):
        parents.append(data.draw(st.integers(-1, slot - 1)))
        parent_score = 0.0 if parents[-1] < 0 else scores[parents[-1]]
        scores.append(parent_score - data.draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, float("inf")])))
    pool = DraftPool(torch.randint(0, 9, (1, size)), torch.tensor([scores]), torch.tensor([parents], dtype=torch.int32))
    check(pool, data.draw(st.integers(1, size + 1)))


def test_static_choices(isa: str) -> None:
    pool = make_pool(2, 40, "random")
    pool.parents[:] = torch.tensor([-1] * 4 + [slot // 4 - 1 for slot in range(4, 40)])
    check(pool, 8, torch.tensor([0, 1, 3, 4, 9, 16, 21], dtype=torch.int32))
    check(pool, 1, torch.tensor([], dtype=torch.int32))


@pytest.mark.parametrize("max_depth, top_k, num_nodes", [(1, 10, 11), (4, 4, 20), (5, 10, 60), (6, 1, 7), (3, 8, 1)])
def test_levels_of_expand_give_a_tree(max_depth: int, top_k: int, num_nodes: int, isa: str) -> None:
    """Frontier masks and the tree's mask agree: they come from the same ancestors by different ways."""
    batch, vocab_size, num_words = 2, 97, (max_depth * top_k + 63) // 64
    pool_size = top_k + (max_depth - 1) * top_k * top_k
    pool = DraftPool(
        torch.full((batch, pool_size), -1), torch.full((batch, pool_size), torch.nan), torch.full((batch, pool_size), -9, dtype=torch.int32)
    )
    scores, pool_index = torch.zeros(batch, 1), torch.full((batch, 1), -1, dtype=torch.int32)
    features, mask = torch.randn(batch, 1, 3), torch.zeros(batch, 1, num_words, dtype=torch.int64)
    offset, row_of_slot = 0, [{-1: []} for _ in range(batch)]
    for level in range(max_depth):
        logits = torch.randn(batch, pool_index.shape[1], vocab_size) * 2
        next_size = top_k if level < max_depth - 1 else 0
        frontier = expand(logits, scores, pool_index, features, mask, pool, offset, top_k, first_row=level * top_k, next_size=next_size)
        for b in range(batch):
            for j, slot in enumerate(frontier.pool_index[b].tolist()):
                rows = row_of_slot[b][int(pool.parents[b, slot])] + [level * top_k + j]
                row_of_slot[b][slot] = rows
                bits = reference.unpack_ancestor_mask(frontier.mask[b, j]).nonzero().flatten().tolist()
                assert bits == rows
        offset += pool_index.shape[1] * top_k
        scores, pool_index, mask = frontier.scores, frontier.pool_index, frontier.mask
        features = torch.randn(batch, next_size, 3)
    assert offset == pool_size and not pool.scores.isnan().any()
    check(pool, num_nodes)


def test_more_nodes_only_add(isa: str) -> None:
    """The nodes of a smaller tree are all in the larger one, on the same paths."""
    pool = make_pool(1, 200, "ties")
    pool.tokens[:] = torch.arange(200)
    root, seq_lens = torch.tensor([1000]), torch.tensor([5], dtype=torch.int32)
    paths = []
    for num_nodes in (1, 5, 20, 64, 150, 201):
        tree = rerank(pool, root, seq_lens, num_nodes)
        parents, tokens = tree.parent[0].tolist(), tree.tokens[0].tolist()
        paths.append({tuple(tokens[node] for node in path_to_root(parents, node)) for node in range(num_nodes)})
    assert all(smaller < larger for smaller, larger in zip(paths, paths[1:]))


def test_empty_batch(isa: str) -> None:
    pool = make_pool(0, 10, "random")
    tree = rerank(pool, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), 5)
    assert tree.tokens.shape == (0, 5) and tree.packed_ancestor_mask.shape == (0, 5, 1)


def test_bad_input_is_named() -> None:
    pool = make_pool(2, 10, "random")
    arguments = {
        "root_tokens": torch.tensor([1, 2]),
        "seq_lens": torch.tensor([1, 2], dtype=torch.int32),
        "choices": torch.tensor([0, 1], dtype=torch.int32),
    }
    call = lambda pool=pool, num_nodes=3, **tensors: rerank(pool, num_nodes=num_nodes, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), first=None)
    for name in arguments:
        assert_refused(name, lambda: call(**(arguments | {name: arguments[name][:1]})))
    for field in DraftPool._fields:
        tensor = getattr(pool, field)
        for bad in (tensor.double(), tensor[:1], tensor[0]):
            with pytest.raises(ValueError, match=r"^(pool\.)?\w+: expected"):
                call(**arguments, pool=pool._replace(**{field: bad}))
    for num_nodes in (0, 12, 257):
        with pytest.raises(ValueError, match="num_nodes"):
            call(root_tokens=arguments["root_tokens"], seq_lens=arguments["seq_lens"], num_nodes=num_nodes)
