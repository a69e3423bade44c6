"""Reference of accept_rejection, in Python numbers (IEEE doubles); sums run over ascending ids."""

import math

import torch

from eagle_kernels.types import Accepted

from .accept import no_paths, set_path
from .gumbel_noise import gumbel_noise, uniform_noise
from .sample import first_argmax

COIN_STREAM = 2
RESIDUAL_STREAM = 3


def accept_rejection(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    active: torch.Tensor,
    max_depth: int,
) -> Accepted:
    """Speculative sampling down a tree whose siblings were drawn without replacement.

    tokens        [B, N] int64; a token below 0 is passed over, for it was not drawn from q
    parent        [B, N] int32
    target_probs  [B, N, V] fp32, distribution of the token after each node
    draft_probs   [B, N, V] fp32, what the children of each node were drawn from
    seeds         [B] int64
    positions     [B] int64, absolute position of the token after the root
    active        [B] bool; inactive rows give all -1, 0 and -1
    returns       Accepted of paths up to max_depth

    p, q = target_probs[node], draft_probs[node]; coins of (seed, position + depth), stream 2
    for each child with token x, ordinal o: accept iff coin[o] * q[x] < p[x]
        else p = normalise(max(0, p - q)); q[x] = 0; q = normalise(q); a sum of 0 changes nothing
    no child left: bonus = arg-max over p > 0 of log(p) + gumbel(seed, position + depth, id), stream 3; without any p > 0: -1
    """
    batch, num_nodes = tokens.shape
    vocab_size = target_probs.shape[2]
    accepted = no_paths(batch, max_depth)
    for b in range(batch):
        if not active[b]:
            continue
        path, child = [], 0
        while child is not None:
            node = child
            path.append(node)
            position = positions[b : b + 1] + len(path) - 1
            coins = uniform_noise(seeds[b : b + 1], position, num_nodes, stream=COIN_STREAM)[0].tolist()
            p, q = target_probs[b, node].tolist(), draft_probs[b, node].tolist()
            children = [c for c in range(1, num_nodes) if parent[b, c] == node] if len(path) <= max_depth else []
            child = None
            for ordinal, candidate in enumerate(children):
                token = int(tokens[b, candidate])
                if token < 0:
                    continue
                if coins[ordinal] * q[token] < p[token]:
                    child = candidate
                    break
                p = normalise([max(0.0, pi - qi) for pi, qi in zip(p, q)], p)
                q[token] = 0.0
                q = normalise(q, q)
        noise = gumbel_noise(seeds[b : b + 1], position, vocab_size, stream=RESIDUAL_STREAM)[0].tolist()
        scores = [math.log(pi) + noise[i] if pi > 0 else -math.inf for i, pi in enumerate(p)]
        set_path(accepted, b, path, first_argmax(scores) if max(scores) > -math.inf else -1)
    return accepted


def normalise(weights: list[float], otherwise: list[float]) -> list[float]:
    """weights / sum(weights), or `otherwise` where the sum is 0."""
    total = 0.0
    for weight in weights:
        total += weight
    return [weight / total for weight in weights] if total > 0 else otherwise
