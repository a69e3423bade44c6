"""The references as the tests on a GPU call them: copies go in, and what was modified comes back. With the CPU as the device."""

import sys

import torch
from eagle_kernels import DraftPool, HeadTopK, pack_weight, reference
from gpu_mode import mapped, on_cpu, references_on_cpu
from helpers import assert_exact, make_paged_cache, strided_copy

NAN = float("nan")


def test_results_and_modified_arguments_are_those_of_the_reference() -> None:
    wrapped = references_on_cpu("cpu")
    cache = make_paged_cache([5, 9], 6, 4, 2, 8, layers=2)
    expected = cache.copy()
    accepted = torch.tensor([[0, 2, 5], [0, 1, -1]], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    reference.compact(*expected, *accepted)
    wrapped["compact"](*cache, *accepted)
    for tensor, other in zip(cache, expected):
        assert_exact(tensor, other)

    pool = DraftPool(torch.randint(0, 9, (1, 4)), torch.tensor([[-1.0, -2, -3, -4]]), torch.full((1, 4), -1, dtype=torch.int32))
    arguments = (pool, torch.tensor([3]), torch.tensor([7], dtype=torch.int32), 4)
    for tensor, other in zip(wrapped["rerank"](*arguments), reference.rerank(*arguments), strict=True):
        assert_exact(tensor, other)

    # Whole numbers: the wrapped reference gets a contiguous copy, which torch may add up in another order.
    features, head = strided_copy(torch.randint(-9, 10, (3, 8)).float()), pack_weight(torch.randint(-9, 10, (20, 8)).float())
    result = wrapped["head_topk"](features, head, 4)
    assert isinstance(result, HeadTopK)
    assert_exact(result.keys, reference.head_topk(features, head, 4).keys)


def test_a_modified_view_changes_nothing_around_it() -> None:
    def double(x: torch.Tensor) -> None:
        x *= 2

    x = strided_copy(torch.ones(2, 3))
    on_cpu(double, "cpu")(x)
    assert_exact(x, torch.full((2, 3), 2.0))
    assert x._base.isnan().sum() == 10


def test_nothing_is_written_where_nothing_changed() -> None:
    """An expanded tensor cannot be written to."""
    x = torch.ones(1, 3).expand(4, 3)
    assert_exact(on_cpu(lambda x: x + 1, "cpu")(x), torch.full((4, 3), 2.0))
    assert_exact(on_cpu(lambda x, y: x.nan_to_num(1.0), "cpu")(torch.tensor([NAN, 2.0]), y=[x]), torch.tensor([1.0, 2.0]))


def test_tensors_go_to_the_device() -> None:
    result = on_cpu(lambda x: {"sum": [x + 1], "none": None}, "meta")(torch.ones(2))
    assert result["sum"][0].device.type == "meta" and result["none"] is None
    assert mapped((1, "a"), lambda tensor: tensor) == (1, "a")


def test_triton_tests_import_neither_scipy_nor_transformers() -> None:
    """A machine with a GPU may have neither."""
    import subprocess
    from pathlib import Path

    here = Path(__file__).parent
    names = [path.stem for path in here.glob("test_triton_*.py")] + ["test_cuda_ops", "test_gpu_graphs", "test_gpu_bitwise"]
    script = "import sys; sys.modules['scipy'] = sys.modules['transformers'] = None\n" + "\n".join(f"import {name}" for name in names)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=here)
    assert result.returncode == 0, result.stderr
