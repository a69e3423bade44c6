"""Sequences of ops that are run again without Python in between: the CPU's counterpart of a captured graph."""

from collections.abc import Iterator
from contextlib import contextmanager

from eagle_kernels._extension import _C


class Recording:
    """The ops that ran inside `record`, in order, with the tensors they were given.

    `replay` runs them again on the same tensors, whose contents may have changed; the number of threads is that of the recording. Recordable are copy_rows, embedding, head_topk, linear, logits_topk,
    rms_norm, rope_store_kv, silu_mul and tree_attention; other ops of this library raise RuntimeError inside `record`. Operations of torch itself are not seen: there must
    be none that compute.
    """

    def __init__(self) -> None:
        self._recording = _C.Recording()

    def __len__(self) -> int:
        return self._recording.num_calls

    def replay(self) -> None:
        self._recording.replay()


@contextmanager
def record() -> Iterator[Recording]:
    """Run the ops of the `with` block and keep them."""
    recording = Recording()
    recording._recording.begin()
    try:
        yield recording
    finally:
        recording._recording.end()
