"""Runs the CUDA kernels of csrc/cuda on the CPU: builds tests/cuda_shim (cached by content), fills the argument structs, guards every buffer.

A case is the list of a struct's 8-byte fields: a tensor (pointer), None (null pointer) or an int. `*_case` make one from the arguments of the op, with fresh outputs.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from eagle_kernels import Accepted, DraftPool, Frontier, HeadTopK, Tree
from eagle_kernels.accept import empty_accepted
from eagle_kernels.expand import empty_frontier

ROOT = Path(__file__).parent.parent
SHIM, KERNELS = ROOT / "tests" / "cuda_shim", ROOT / "csrc" / "cuda"
BUILD = ROOT / "build" / "cuda_shim"
NAMES = ("accept", "compact", "expand_topk", "rerank")
FLAGS = ["-std=c++17", "-O2", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-clobbered", "-pthread", f"-I{SHIM}", f"-I{KERNELS}"]
KINDS = {
    "fibers": ("fibers.cpp", ["-fPIC", "-shared"]),
    "threads": ("threads.cpp", ["-fPIC", "-shared"]),
    "asan": ("fibers.cpp", ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DEAGLE_SHIM_MAIN"]),
    "tsan": ("threads.cpp", ["-fsanitize=thread", "-DEAGLE_SHIM_MAIN"]),
}
GUARD = 64  # bytes before and behind each buffer
Case = list[torch.Tensor | int | None]


def build(kind: str, kernel: str | None = None, planted: tuple[str, str] | None = None) -> Path:
    """The shim as a library ("fibers", "threads") or a program ("asan", "tsan").

    kernel, planted: only this kernel matters, and in its source the first text, which must stand there exactly once, is replaced by the second.
    """
    scheduler, flags = KINDS[kind]
    objects = [_object(SHIM / scheduler, flags), _object(SHIM / "entry.cpp", flags)]
    for name in NAMES:
        source = (KERNELS / f"{name}.cu").read_text()
        if name == kernel and planted is not None:
            assert source.count(planted[0]) == 1, f"{name}.cu: {planted[0]!r} stands there {source.count(planted[0])} times"
            source = source.replace(*planted)
        objects.append(_object(KERNELS / f"{name}.cu", flags, source))
    program = BUILD / f"{kind}-{_hash(*(path.name for path in objects))}"
    return _compile(program, [*FLAGS, *flags, *map(str, objects)])


def _object(path: Path, flags: list[str], source: str | None = None) -> Path:
    flags = [flag for flag in flags if flag != "-shared"]
    headers = [*SHIM.glob("*.h"), *KERNELS.glob("*.h"), *(ROOT / "csrc" / "cpu").glob("*.h"), ROOT / "csrc" / "fp32_math.h"]
    text = path.read_text() if source is None else source
    key = _hash(path.name, text, *FLAGS, *flags, *(header.read_text() for header in sorted(headers)))
    copy = BUILD / f"{path.stem}-{key}.cpp"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text.replace('#include "../', f'#include "{ROOT}/csrc/' if path.suffix == ".cu" else f'#include "{SHIM}/../'))
    return _compile(BUILD / f"{path.stem}-{key}.o", [*FLAGS, *flags, "-c", str(copy)])


def _compile(target: Path, arguments: list[str]) -> Path:
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}.part")
        done = subprocess.run(["g++", *arguments, "-o", str(part)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        part.rename(target)
    return target


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def storage_span(tensor: torch.Tensor) -> torch.Tensor:
    """Everything between the first and the last element of a tensor, in one dimension."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
    return torch.as_strided(tensor, (span,), (1,))


def run(name: str, case: Case, seed: int = 0, *, kind: str = "fibers", shifts: dict[int, int] | None = None) -> None:
    """Run a kernel on a case, in place. Each buffer lies between guards of NaN or absurd integers, which must survive, and starts at a multiple of 64 bytes, or `shifts[field]` behind one."""
    native = ctypes.CDLL(str(build(kind)))
    fields, guarded = (ctypes.c_int64 * len(case))(), []
    for i, value in enumerate(case):
        if isinstance(value, torch.Tensor):
            span = storage_span(value)
            wide = torch.full((3 * GUARD + span.nbytes,), 0xFF if value.is_floating_point() else 0xA5, dtype=torch.uint8)
            start = GUARD + (shifts or {}).get(i, 0)
            wide[start : start + span.nbytes] = span.view(torch.uint8)
            guarded.append((i, value, wide, start))
            fields[i] = wide.data_ptr() + start
        else:
            fields[i] = 0 if value is None else value
    error = native.eagle_shim_run(name.encode(), fields, len(case), ctypes.c_uint64(seed))
    assert error == 0, f"{name}: launch error {error}"
    for i, value, wide, start in guarded:
        fill = 0xFF if value.is_floating_point() else 0xA5
        span = storage_span(value)
        end = start + span.nbytes
        assert (wide[:start] == fill).all() and (wide[end:] == fill).all(), f"{name}: wrote outside the buffer of field {i}"
        span.view(torch.uint8).copy_(wide[start:end])


def run_program(program: Path, name: str, case: Case, directory: Path, seed: int = 0) -> subprocess.CompletedProcess:
    """Run a kernel of a sanitized program on a case; when it ends well, the results are put into the case's tensors."""
    words = bytearray(len(case).to_bytes(8, "little"))
    spans = []
    for value in case:
        if isinstance(value, torch.Tensor):
            spans.append(storage_span(value))
            data = spans[-1].view(torch.uint8).numpy().tobytes()
            words += bytes(8) + len(data).to_bytes(8, "little") + data + bytes(-len(data) % 8)
        else:
            words += (0 if value is None else value).to_bytes(8, "little", signed=True) + (-1).to_bytes(8, "little", signed=True)
    case_file, result = directory / f"{name}.case", directory / f"{name}.result"
    case_file.write_bytes(words)
    result.unlink(missing_ok=True)
    environment = os.environ | {"ASAN_OPTIONS": "detect_stack_use_after_return=0", "TSAN_OPTIONS": "exitcode=66 halt_on_error=1"}
    done = subprocess.run([*fixed_layout(), str(program), name, str(case_file), str(result), str(seed)], capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode == 0:
        data, at = torch.frombuffer(bytearray(result.read_bytes()) or bytearray(1), dtype=torch.uint8), 0
        for span in spans:
            span.view(torch.uint8).copy_(data[at : at + span.nbytes])
            at += (span.nbytes + 7) // 8 * 8
    return done


@functools.cache
def fixed_layout() -> list[str]:
    """Where addresses are spread widely, older ThreadSanitizers do not start; a fixed layout suits all, where a process may ask for one."""
    command = ["setarch", "-R"]
    allowed = shutil.which("setarch") is not None and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if allowed else []


def poison(tensors: tuple[torch.Tensor, ...]) -> None:
    """Outputs start as NaN or absurd integers."""
    for tensor in tensors:
        storage_span(tensor).view(torch.uint8).fill_(0xFF if tensor.is_floating_point() else 0xA5)


def accept_case(tokens, parent, sampled, active, max_depth, *, stop_token_ids=None, output_ring=None) -> tuple[Case, Accepted]:
    result = empty_accepted(tokens, max_depth)
    poison(result)
    batch, nodes = tokens.shape
    stops = 0 if stop_token_ids is None else stop_token_ids.shape[1]
    ring_size = 0 if output_ring is None else output_ring.shape[1] - 1
    return [tokens, parent, sampled, active, stop_token_ids, output_ring, *result, batch, nodes, max_depth, stops, ring_size], result


def compact_case(kv_cache, page_table, seq_lens, accepted_nodes, num_accepted_drafts) -> tuple[Case, None]:
    layers, _, pages, page_size = kv_cache.shape[:4]
    row_bytes = kv_cache[0, 0, 0, 0].nbytes
    return [kv_cache, page_table, seq_lens, accepted_nodes, num_accepted_drafts, layers, pages, page_size, row_bytes, *page_table.shape, accepted_nodes.shape[1]], None


def rerank_case(pool: DraftPool, root_tokens, seq_lens, num_nodes, *, choices=None) -> tuple[Case, Tree]:
    batch, size = pool.tokens.shape
    words = (num_nodes + 63) // 64
    ids, small = torch.empty(batch, num_nodes, dtype=torch.int64), torch.empty(batch, num_nodes, dtype=torch.int32)
    tree = Tree(ids, small, small.clone(), torch.empty(batch, num_nodes, words, dtype=torch.int64), ids.clone())
    poison(tree)
    return [*pool, root_tokens, seq_lens, choices, *tree, batch, size, num_nodes, words], tree


def expand_topk_case(
    head: HeadTopK, frontier_scores, frontier_pool_index, features, frontier_mask, pool, pool_offset, top_k, *, first_row, next_size, draft_to_target=None, choices=None,
    seq_lens=None, depth=0, position_ids=None,
) -> tuple[Case, Frontier]:
    frontier = empty_frontier(features, frontier_mask, next_size)
    poison(frontier)
    batch, nodes, tiles, _ = head.keys.shape
    item = features.element_size()
    draft_vocab = 0 if draft_to_target is None else len(draft_to_target)
    sizes = [batch, nodes, tiles, draft_vocab, features.shape[2] * item, frontier_mask.shape[2], pool.tokens.shape[1], pool_offset, top_k, first_row, next_size]
    strides = [features.stride(0) * item, features.stride(1) * item]
    return [*head, frontier_scores, frontier_pool_index, features, frontier_mask, draft_to_target, choices, *pool, *frontier, seq_lens, position_ids, depth, *sizes, *strides], frontier


CASES = {"accept": accept_case, "compact": compact_case, "expand_topk": expand_topk_case, "rerank": rerank_case}


def require_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++: the kernels of csrc/cuda are built for the CPU by it")
