"""torch.library.opcheck of every registered op: schema, what it modifies, fake kernel."""

import pytest
import torch
from eagle_kernels import pack_weight
from helpers import make_paged_cache, packed_mask, random_tree
from test_accept_rejection import make_inputs as make_rejection_inputs
from test_compact import make_accepted
from test_expand_topk import make_head
from test_rope_store_kv import make_rope_table
from test_sample import make_parameters, make_penalties

OPS = torch.ops.eagle_kernels


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, 9, shape, dtype=dtype)


def make_cases() -> dict[str, list[tuple[object, ...]]]:
    """Arguments of each op, with its optional tensors present and absent."""
    x, fp32, bf16 = torch.randn(3, 20), pack_weight(torch.randn(37, 20)), pack_weight(torch.randn(37, 20).bfloat16())
    experts = pack_weight(torch.randn(4, 37, 20))
    cache = make_paged_cache([5, 9], 6, 16, 2, 16, poison=0.0)
    layers = make_paged_cache([5, 9], 6, 16, 2, 16, layers=2, poison=0.0)
    q = torch.randn(2, 6, 4, 16)
    k, v = torch.randn(2, 6, 2, 16), torch.randn(2, 6, 2, 16)
    parameters = make_parameters(4, 33)
    keys = tuple(parameters.values())
    filters = keys[:4]
    logits = torch.randn(4, 33)
    penalties = make_penalties(4, 33)
    pool = (torch.zeros(2, 40, dtype=torch.int64), -torch.rand(2, 40).sort(-1).values, torch.full((2, 40), -1, dtype=torch.int32))
    frontier = (torch.empty(2, 5, dtype=torch.int64), torch.empty(2, 5), torch.empty(2, 5, dtype=torch.int32), torch.empty(2, 5, 7), torch.empty(2, 5, 1, dtype=torch.int64))
    expand = (torch.randn(2, 3, 33), torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.int32), torch.randn(2, 3, 7), torch.zeros(2, 3, 1, dtype=torch.int64), *pool, 1, 4, 0)
    head, expand_topk = make_head(expand[0], 16, 4), expand[1:]
    tree = (torch.empty(2, 6, dtype=torch.int64), *(torch.empty(2, 6, dtype=torch.int32) for _ in range(2)), torch.empty(2, 6, 1, dtype=torch.int64), torch.empty(2, 6, dtype=torch.int64))
    accepted = (torch.empty(2, 6, dtype=torch.int32), torch.empty(2, dtype=torch.int32), torch.empty(2, dtype=torch.int64))
    rejection = make_rejection_inputs(2, 6, 9, "random", 0.0)
    return {
        "linear": [(x, fp32.data, None, 37, False, torch.empty(3, 37)), (x, bf16.data, torch.randn(37), 37, True, torch.empty(3, 37))],
        "expert_linear": [(x, experts.data, torch.tensor([0, 3, 1], dtype=torch.int32), 37, torch.empty(3, 37))],
        "embedding": [(ids(5), fp32.data, 37, torch.empty(5, 20)), (ids(5), bf16.data, 37, torch.empty(5, 20))],
        "rms_norm": [(x, torch.randn(20), 1e-5, None, torch.empty(3, 20)), (x, torch.randn(20), 1e-5, torch.randn(3, 20), torch.empty(3, 20))],
        "copy_rows": [(x, torch.empty(3, 60)[:, 20:40])],
        "silu_mul": [(x, torch.empty(3, 10))],
        "route_experts": [(x, True, torch.empty(3, 2), torch.empty(3, 2, dtype=torch.int32))],
        "rope_store_kv": [(q.clone(), k, v, ids(2, 6), make_rope_table(9, 16), *cache.copy(), 0)],
        "tree_attention": [
            (q, *cache, packed_mask(random_tree(2, 6)), 0.25, 0, 0.0, False, torch.empty_like(q), None),
            (q, *cache, None, 0.25, 3, 5.0, True, torch.empty_like(q), torch.empty(2, 6, 4)),
        ],
        "sample": [
            (logits, *keys, False, None, None, None, None, None, None, torch.empty(4, dtype=torch.int64), None),
            (logits, *keys, True, *penalties.values(), torch.empty(4, dtype=torch.int64), torch.empty(4)),
        ],
        "filter_probs": [(logits, *filters, False, torch.empty(4, 33))],
        "draw_children": [(logits, *keys, 2, False, torch.empty(4, 3, dtype=torch.int64))],
        "noise": [(*keys[4:], 2, True, torch.empty(4, 7)), (*keys[4:], 0, False, torch.empty(4, 7))],
        "head_topk": [(x, fp32.data, 37, torch.empty(3, 1, 4, dtype=torch.int64), torch.empty(3, 1), torch.empty(3, 1))],
        "logits_topk": [(x, torch.empty(3, 1, 4, dtype=torch.int64), torch.empty(3, 1), torch.empty(3, 1))],
        "expand": [(*expand, None, None, *frontier), (*expand, torch.arange(33), torch.arange(5, dtype=torch.int32), *frontier)],
        "expand_topk": [
            (*head, *expand_topk, None, None, None, 0, *frontier, None),
            (*head, *expand_topk, torch.arange(33), torch.arange(5, dtype=torch.int32), ids(2, dtype=torch.int32), 1, *frontier, torch.empty(2, 5, dtype=torch.int64)),
        ],
        "rerank": [(*pool, ids(2), ids(2, dtype=torch.int32), None, *tree), (*pool, ids(2), ids(2, dtype=torch.int32), torch.arange(5, dtype=torch.int32), *tree)],
        "accept": [
            (ids(2, 6), random_tree(2, 6), ids(2, 6), torch.tensor([True, False]), None, None, *accepted),
            (ids(2, 6), random_tree(2, 6), ids(2, 6), torch.tensor([True, True]), ids(2, 3), ids(2, 9), *accepted),
        ],
        "accept_rejection": [(*rejection.values(), *accepted)],
        "advance": [(ids(2, 6), torch.randn(2, 6, 7), *make_accepted([[0, 2, 4], [0]], 5), ids(2), torch.tensor([True, False]), ids(2, dtype=torch.int32), ids(2), ids(2), ids(2, 6), torch.randn(2, 6, 7), *missed) for missed in ((None,) * 3, (ids(2), ids(2, 9), torch.randn(2, 9, 7)))],
        "compact": [(*layers, *make_accepted([[0, 2, 4], [0]], 5))],
    }


NAMES = sorted(make_cases())


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    for arguments in make_cases()[name]:
        torch.library.opcheck(getattr(OPS, name).default, arguments)


def test_every_registered_op_is_checked() -> None:
    registered = {schema.name.removeprefix("eagle_kernels::") for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("eagle_kernels::")}
    assert registered == set(NAMES)


def write_to(x: torch.Tensor) -> None:
    x.add_(1)


def test_opcheck_can_fail() -> None:
    """An op that writes to a tensor its schema calls read-only."""
    with torch.library._scoped_library("eagle_kernels_test", "DEF") as library:
        library.define("liar(Tensor x) -> ()")
        library.impl("liar", write_to, "CPU")
        library.impl("liar", lambda x: None, "Meta")
        with pytest.raises(Exception, match="mutated|modified|not mutable"):
            torch.library.opcheck(torch.ops.eagle_kernels_test.liar.default, (torch.ones(3),))
