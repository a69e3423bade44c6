"""Loads the native extension; the ops of `torch.ops.eagle_kernels` exist once this module has been imported."""

import os

import torch  # noqa: F401  (its libraries must be loaded first)

try:
    from eagle_kernels import _C
except ImportError as error:
    raise ImportError(
        f"eagle_kernels: the native extension is missing or was built for another torch ({error}); build it with `pip install --no-build-isolation -e .` at the root of the repository"
    ) from error

OPS = torch.ops.eagle_kernels


def isa() -> str:
    """Instruction set of the CPU kernels in use: "amx", "avx512", "avx2" or "portable"."""
    return _C.isa()


def set_isa(name: str) -> None:
    """Choose the instruction set of the CPU kernels for this process; without it, or EAGLE_ISA in the environment, the best one of the processor.

    All give the same bits, but for products with bf16 weights under "amx", which adds in another order: there too a row's bits depend on that row alone. ValueError when the processor lacks it.
    """
    _C.set_isa(name)


def available_isas() -> list[str]:
    """Instruction sets that this processor has, "portable" first."""
    return _C.available_isas()


if os.environ.get("EAGLE_ISA"):
    try:
        set_isa(os.environ["EAGLE_ISA"])
    except ValueError as error:
        raise ImportError(f"EAGLE_ISA: {error}; this processor has {', '.join(available_isas())}") from None

_POOL_FIELDS = {"pool_tokens": "pool.tokens", "pool_scores": "pool.scores", "pool_parents": "pool.parents"}


def _fake(name: str):
    """The ops only write to tensors they are given, so there is no result to infer; what remains of an op without data is that its tensors share a device."""
    schema = getattr(OPS, name).default._schema

    def check_devices(*args) -> None:
        tensors = [(_POOL_FIELDS.get(argument.name, argument.name), value) for argument, value in zip(schema.arguments, args) if isinstance(value, torch.Tensor)]
        device = tensors[0][1].device if all(tensor.device.type == "meta" for _, tensor in tensors) else next(tensor.device for _, tensor in tensors if tensor.device.type != "meta")
        for argument, tensor in tensors:
            if tensor.device != device:
                kind = str(tensor.dtype).removeprefix("torch.")
                raise ValueError(f"{argument}: expected {list(tensor.shape)} {kind} on {device}, got {list(tensor.shape)} {kind} on {tensor.device}")

    return check_devices


for _name in (
    "linear", "expert_linear", "embedding", "rms_norm", "copy_rows", "silu_mul", "route_experts", "rope_store_kv", "tree_attention", "sample", "filter_probs", "draw_children", "noise", "expand", "expand_topk", "rerank",
    "accept", "accept_rejection", "advance", "compact", "head_topk", "logits_topk",
):  # fmt: skip
    torch.library.register_fake(f"eagle_kernels::{_name}", _fake(_name))

if torch.version.cuda is not None:
    from eagle_kernels import _cuda

    _cuda.register()
