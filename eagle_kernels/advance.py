"""The end of a step: what was accepted becomes the start of the next."""

from torch import Tensor

from eagle_kernels._extension import OPS
from eagle_kernels.types import Accepted


def advance(
    tokens: Tensor, features: Tensor, accepted: Accepted, active: Tensor, seq_lens: Tensor, root_tokens: Tensor, num_pending: Tensor, pending_tokens: Tensor, pending_features: Tensor,
    num_missed: Tensor | None = None, missed_tokens: Tensor | None = None, missed_features: Tensor | None = None,
) -> None:  # fmt: skip
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
    missed_tokens     [B, M] int64, with num_missed and missed_features, or none of the three: pairs that the drafter has not seen; modified: the pending pairs of an active row, before new ones take their
                      place, are appended to its num_missed first ones; the caller sees to it that M suffices
    missed_features   [B, M, H], features' dtype; modified likewise
    num_missed        [B] int64; modified: += num_pending as it was

    Past the path pending rows hold the root's token and feature: the next draft runs over them and throws the result away.
    An inactive row stays as it is: a step more, sent off before the host has seen that the row ended, does the same again.
    """
    OPS.advance(tokens, features, *accepted, active, seq_lens, root_tokens, num_pending, pending_tokens, pending_features, num_missed, missed_tokens, missed_features)
