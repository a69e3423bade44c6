"""Settings of an engine, checked on creation."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_engine.errors import EagleError

TREES = ("adaptive", "dynamic", "static", "chain")
ACCEPTANCE_RULES = ("exact", "rejection")
FILTER_ORDERS = ("hf", "vllm")
MAX_NODES = 256
MAX_TOP_K = 64
MAX_FRONTIER = 64

# A static tree for a small node budget. Each entry is a path of ranks among the drafter's choices.
# What a tree is when the user does not say: the largest that an adaptive tree may become, and the fastest fixed one of those measured for the demo pair on two CPU cores (bench/NOTES.md).
ADAPTIVE_SIZE = dict(top_k=4, max_depth=6, num_nodes=16)
FIXED_SIZE = dict(top_k=3, max_depth=2, num_nodes=5)

STATIC_CHOICES: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 0), (0, 1), (1, 0))


@dataclass(frozen=True)
class EagleConfig:
    """How the engine drafts, accepts and stores.

    tree            "adaptive" (the shape follows the drafter's confidence, EAGLE-2, and max_depth and num_nodes are chosen for each step by what they cost on this machine and what they have brought lately:
                    none at all where drafting does not pay), "dynamic" (EAGLE-2: of one max_depth and num_nodes), "static" (EAGLE-1: `choices`) or "chain"
    top_k           continuations kept per node, and nodes of a frontier, in an adaptive or dynamic tree; None: 4, dynamic 3
    max_depth       greatest depth of a node; the published code's depth setting is one less; None: 6, others than adaptive 2
    num_nodes       most nodes of an adaptive tree, nodes of a dynamic one, the root included; None: 16, dynamic 5, or as many as there can be
    choices         static tree: paths of ranks, parents included
    acceptance      "exact": a draft is accepted when it is the token that plain decoding draws, so the text is that of plain decoding.
                    "rejection": speculative sampling on drafts that were drawn from the drafter; exact in distribution; chain and static trees
    filter_order    "hf" (top_k, top_p, min_p) or "vllm" (min_p, top_k, top_p)
    max_model_len   most tokens of a sequence, prompt included; None: the target's max_position_embeddings, at most 8192
    max_batch_size  most sequences per step; further requests wait
    page_size       rows of a page of the KV cache
    num_pages       pages of the pool; None: enough for max_batch_size sequences of max_model_len
    prefill_chunk   prompt tokens per forward, at most 256; while others decode, a step runs one such piece of the prompts that have come in
    enable_prefix_caching  keep the pages of sequences that have ended until the room is needed, for prompts that begin with the same tokens; the drafter's rows with them, so that nothing changes but
                    the time
    enforce_eager   run every op from Python instead of replaying a recording (CPU: of the verify forward) or a captured graph (CUDA: of the whole step); the same bits, slower
    deterministic   CUDA: row-invariant kernels, with which the text is that of plain decoding bit for bit; the fastest kernels may round differently for other numbers of rows. On the
                    CPU always so
    """

    tree: str = "adaptive"
    top_k: int | None = None
    max_depth: int | None = None
    num_nodes: int | None = None
    choices: tuple[tuple[int, ...], ...] = STATIC_CHOICES
    acceptance: str = "exact"
    filter_order: str = "hf"
    max_model_len: int | None = None
    max_batch_size: int = 8
    page_size: int = 16
    num_pages: int | None = None
    prefill_chunk: int = 256
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        _one_of("tree", self.tree, TREES)
        for name, size in (ADAPTIVE_SIZE if self.tree == "adaptive" else FIXED_SIZE).items():
            if getattr(self, name) is None:
                # Nodes come last: no more than the others leave room for.
                room = self.top_k + (self.max_depth - 1) * self.top_k**2 + 1 if name == "num_nodes" and isinstance(self.top_k, int) and isinstance(self.max_depth, int) else size
                object.__setattr__(self, name, max(min(size, room), 1))
        _one_of("acceptance", self.acceptance, ACCEPTANCE_RULES)
        _one_of("filter_order", self.filter_order, FILTER_ORDERS)
        _in_range("top_k", self.top_k, 1, MAX_TOP_K)
        _in_range("max_depth", self.max_depth, 1, 64)
        _in_range("num_nodes", self.num_nodes, 1, MAX_NODES)
        _in_range("max_batch_size", self.max_batch_size, 1, 4096)
        _in_range("page_size", self.page_size, 1, 4096)
        _in_range("prefill_chunk", self.prefill_chunk, 1, 256)
        for name in ("max_model_len", "num_pages"):
            if getattr(self, name) is not None:
                _in_range(name, getattr(self, name), 1, 1 << 24)
        if self.acceptance == "rejection" and self.is_dynamic:
            raise EagleError("acceptance 'rejection' needs drafts that are drawn from the drafter: use tree 'chain' or 'static', or acceptance 'exact'")
        if self.is_dynamic:
            pool = self.top_k + (self.max_depth - 1) * self.top_k**2
            if self.num_nodes - 1 > pool:
                raise EagleError(f"num_nodes {self.num_nodes} is more than a tree of top_k {self.top_k} and max_depth {self.max_depth} can hold; at most {pool + 1}")
            if (self.max_depth - 1) * self.top_k > MAX_NODES:
                raise EagleError(f"(max_depth - 1) * top_k must be at most {MAX_NODES}, got {(self.max_depth - 1) * self.top_k}")
        if self.tree == "static":
            try:
                object.__setattr__(self, "choices", tuple(tuple(path) for path in self.choices))
            except TypeError as error:
                raise EagleError(f"choices: expected a list of paths of ranks, such as [[0], [1], [0, 0]], got {self.choices!r}") from error
            _check_choices(self.choices)

    @property
    def is_dynamic(self) -> bool:
        """Whether trees follow the drafter's confidence."""
        return self.tree in ("dynamic", "adaptive")

    @classmethod
    def from_published(cls, total_token: int, depth: int, top_k: int, **options) -> EagleConfig:
        """The settings of the published EAGLE-2 code, whose `depth` counts draft forwards after the first: max_depth = depth + 1."""
        return cls(tree="dynamic", num_nodes=total_token, max_depth=depth + 1, top_k=top_k, **options)


def _check_choices(choices: tuple[tuple[int, ...], ...]) -> None:
    known = set(choices)
    if not choices or len(known) != len(choices):
        raise EagleError("choices: expected a list of different paths of ranks, such as [[0], [1], [0, 0]]")
    for path in choices:
        if not path or not all(isinstance(rank, int) and 0 <= rank < MAX_TOP_K for rank in path):
            raise EagleError(f"choices: {list(path)} is not a path of ranks from 0 to {MAX_TOP_K - 1}")
        if len(path) > 1 and path[:-1] not in known:
            raise EagleError(f"choices: {list(path)} has no parent {list(path[:-1])} in the list")
    for depth in range(1, max(len(path) for path in choices)):
        expanded = {path[:depth] for path in choices if len(path) > depth}
        if len(expanded) > MAX_FRONTIER:
            raise EagleError(f"choices: a level has at most {MAX_FRONTIER} nodes with children, depth {depth} has {len(expanded)}")
    if len(choices) + 1 > MAX_NODES:
        raise EagleError(f"choices: a tree has at most {MAX_NODES} nodes, got {len(choices) + 1}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise EagleError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise EagleError(f"{name}: expected a whole number from {low} to {high}, got {value!r}")
