"""The ops of the draft tree on a GPU against the references, byte for byte, and captured in a graph. The same tests on the CPU keep this file from rotting where there is no GPU."""

import pytest
import torch
from eagle_kernels import DraftPool, HeadTopK, accept, compact, copy_rows, expand_topk, reference, rerank
from helpers import PagedCache, assert_exact, make_paged_cache, random_tree
from test_accept import OPTION_CASES, check_options
from test_compact import CASES as COMPACT_CASES
from test_compact import Case as CompactCase
from test_compact import make_accepted, random_path
from test_expand_topk import CASES as EXPAND_CASES
from test_expand_topk import Case as ExpandCase
from test_expand_topk import clone_arguments
from test_expand_topk import make_inputs as make_expand_inputs
from test_expand_topk import written
from test_rerank import make_pool

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def to(value: object, device: str) -> object:
    """Tensors, alone or in a NamedTuple, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return type(value)(*(tensor.to(device) for tensor in value)) if isinstance(value, (DraftPool, HeadTopK, PagedCache)) else value


def assert_all_exact(actual, expected) -> None:
    for tensor, other in zip(actual, expected, strict=True):
        assert_exact(tensor.cpu(), other)


@devices
@pytest.mark.parametrize("case", EXPAND_CASES, ids=str)
def test_expand_topk(case: ExpandCase, device: str) -> None:
    arguments = make_expand_inputs(case)
    on_device = {name: to(value, device) for name, value in clone_arguments(arguments).items()}
    result = expand_topk(**on_device)
    assert_all_exact((*result, *written(on_device)), (*reference.expand_topk(**arguments), *written(arguments)))


@devices
@pytest.mark.parametrize("kind", ["random", "ties", "infinite"])
@pytest.mark.parametrize("batch, pool_size, num_nodes", [(1, 1, 1), (3, 510, 60), (2, 700, 256)])
def test_rerank(batch: int, pool_size: int, num_nodes: int, kind: str, device: str) -> None:
    pool, root_tokens, seq_lens = make_pool(batch, pool_size, kind), torch.randint(0, 1000, (batch,)), torch.randint(0, 5000, (batch,), dtype=torch.int32)
    tree = rerank(to(pool, device), root_tokens.to(device), seq_lens.to(device), num_nodes)
    assert_all_exact(tree, reference.rerank(pool, root_tokens, seq_lens, num_nodes))


@devices
@pytest.mark.parametrize("batch, num_nodes, vocab_size, max_depth, num_stop_tokens, ring_size", OPTION_CASES)
def test_accept(batch: int, num_nodes: int, vocab_size: int, max_depth: int, num_stop_tokens: int, ring_size: int | None, device: str) -> None:
    def run(*args, stop_token_ids, output_ring):
        """The op on the device; what it modifies is copied back."""
        tokens, parent, sampled, active, depth = args
        active_there, ring_there = active.to(device), None if output_ring is None else output_ring.to(device)
        stops_there = None if stop_token_ids is None else stop_token_ids.to(device)
        accepted = accept(tokens.to(device), parent.to(device), sampled.to(device), active_there, depth, stop_token_ids=stops_there, output_ring=ring_there)
        active.copy_(active_there)
        if output_ring is not None:
            output_ring.copy_(ring_there)
        return [tensor.cpu() for tensor in accepted]

    check_options(batch, num_nodes, vocab_size, max_depth, num_stop_tokens, ring_size, run)


@devices
@pytest.mark.parametrize("case", COMPACT_CASES, ids=str)
def test_compact(case: CompactCase, device: str) -> None:
    cache = make_paged_cache(case.seq_lens, case.num_nodes, case.page_size, case.num_kv_heads, case.head_dim, dtype=case.dtype, layers=case.layers)
    for paths in ([random_path(case.num_nodes, case.max_depth) for _ in case.seq_lens], [[0, *range(2, case.max_depth + 2)] if case.num_nodes > case.max_depth + 1 else None for _ in case.seq_lens]):
        accepted, expected = make_accepted(paths, case.max_depth), cache.copy()
        reference.compact(*expected, *accepted)
        on_device = to(cache, device)
        kv = on_device.kv.clone()
        compact(kv, on_device.page_table, on_device.seq_lens, *(tensor.to(device) for tensor in accepted))
        assert_exact(kv.cpu(), expected.kv)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copy_rows(dtype: torch.dtype, device: str) -> None:
    x, wide = torch.randn(60, 96).to(dtype), torch.randn(60, 288).to(dtype)
    expected, there = wide.clone(), wide.to(device)
    reference.copy_rows(x, expected[:, 96:192])
    copy_rows(x.to(device), there[:, 96:192])
    assert_exact(there.cpu(), expected)
    with pytest.raises(ValueError, match=rf"^out: expected \[60, 96\] {str(dtype)[6:]}, last dimension contiguous on {device}.*got \[60, 288\]"):
        copy_rows(x.to(device), there)


@devices
def test_bad_input_is_named(device: str) -> None:
    """The messages say which device the tensors should share."""
    tokens, parent = torch.zeros(2, 4, dtype=torch.int64, device=device), random_tree(2, 4).to(device)
    with pytest.raises(ValueError, match=rf"^parent: expected \[2, 4\] int32, contiguous on {device}.*got \[1, 4\] int32 on {device}"):
        accept(tokens, parent[:1], tokens, torch.ones(2, dtype=torch.bool, device=device), 2)


@pytest.mark.gpu
def test_limits_of_cuda_are_named() -> None:
    pool = DraftPool(torch.zeros(1, 20481, dtype=torch.int64), torch.zeros(1, 20481), torch.zeros(1, 20481, dtype=torch.int32))
    with pytest.raises(ValueError, match="pool: expected at most 20480 candidates on CUDA, got 20481"):
        rerank(to(pool, "cuda"), torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda"), 4)
    cache = to(make_paged_cache([5], 10, 16, 2, 16, layers=2), "cuda")
    with pytest.raises(ValueError, match="accepted_nodes: expected at most 256 columns on CUDA, got 257"):
        compact(*cache, torch.zeros(1, 257, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda"))


@pytest.mark.gpu
def test_a_captured_step_equals_an_eager_one() -> None:
    """expand_topk, rerank, accept and compact in one graph, replayed on new contents."""
    case = ExpandCase(2, 4, 300, 16, 5, 5, num_words=1)
    buffers = {name: to(value, "cuda") for name, value in make_expand_inputs(case).items()}
    pool = buffers["pool"]
    root, seq_lens = torch.tensor([3, 4], device="cuda"), torch.tensor([7, 30], dtype=torch.int32, device="cuda")
    sampled, active = torch.zeros(2, 12, dtype=torch.int64, device="cuda"), torch.ones(2, dtype=torch.bool, device="cuda")
    cache = to(make_paged_cache([7, 30], 12, 16, 2, 16, layers=2), "cuda")

    def step():
        frontier = expand_topk(**buffers)
        tree = rerank(pool, root, seq_lens, 12)
        accepted = accept(tree.tokens, tree.parent, sampled, active, 3)
        compact(*cache, accepted.accepted_nodes, accepted.num_accepted_drafts)
        return (*frontier, *tree, *accepted)

    def new_contents() -> None:
        for name, value in make_expand_inputs(case).items():
            if isinstance(value, torch.Tensor):
                buffers[name].copy_(value)
        for buffer, value in zip(buffers["head"], make_expand_inputs(case)["head"]):
            buffer.copy_(value)
        # Every slot outside the written ones is a bad child of the root, so that the pool is a whole tree.
        pool.tokens.copy_(torch.randint(0, 3, pool.tokens.shape))
        pool.scores.fill_(-100.0)
        pool.parents.fill_(-1)
        buffers["frontier_pool_index"].fill_(-1)
        sampled.copy_(torch.randint(0, 300, sampled.shape))

    new_contents()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for _ in range(5):
        new_contents()
        start = cache.kv.clone()
        graph.replay()
        replayed, kv = [tensor.clone() for tensor in outputs], cache.kv.clone()
        cache.kv.copy_(start)
        for tensor, other in zip(step(), replayed):
            assert_exact(tensor.cpu(), other.cpu())
        assert_exact(cache.kv.cpu(), kv.cpu())
