"""The end of a step: what was accepted becomes the start of the next."""

from torch import Tensor

from eagle_kernels._extension import OPS
from eagle_kernels.types import Accepted


def advance(
    tokens: Tensor, features: Tensor, accepted: Accepted, active: Tensor, seq_lens: Tensor, root_tokens: Tensor, num_pending: Tensor, pending_tokens: Tensor, pending_features: Tensor
) -> None:
    """Hand the accepted rows to the next draft, and count them as committed.

    tokens            [B, N] int64, of the tree
    features          [B, N, H], contiguous, of the target's forward over the tree
    accepted          Accepted of paths up to max_depth
    active            [B] bool, as `accept` leaves it
    seq_lens          [B] int32; modified: += num_accepted_drafts + 1
    root_tokens       [B] int64; modified: the bonus token
    num_pending       [B] int64; modified: num_accepted_drafts + 1
    pending_tokens    [B, max_depth + 1] int64; modified: the token after each accepted node, the bonus token after the last
    pending_features  [B, max_depth + 1, H], features' dtype; modified: the feature of each accepted node

    Past the path pending rows hold the root's token and feature: the next draft runs over them and throws the result away.
    An inactive row stays as it is: a step more, sent off before the host has seen that the row ended, does the same again.
    """
    OPS.advance(tokens, features, *accepted, active, seq_lens, root_tokens, num_pending, pending_tokens, pending_features)
