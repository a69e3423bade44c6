"""Reference of advance: one sequence at a time."""

from torch import Tensor

from eagle_kernels.types import Accepted


def advance(
    tokens: Tensor, features: Tensor, accepted: Accepted, active: Tensor, seq_lens: Tensor, root_tokens: Tensor, num_pending: Tensor, pending_tokens: Tensor, pending_features: Tensor,
    num_missed: Tensor | None = None, missed_tokens: Tensor | None = None, missed_features: Tensor | None = None,
) -> None:  # fmt: skip
    """Hand the accepted rows to the next step.

    tokens            [B, N] int64
    features          [B, N, H], of the target's forward over the tree
    accepted          Accepted of paths up to max_depth
    active            [B] bool
    seq_lens          [B] int32                     modified: += num_accepted_drafts + 1
    root_tokens       [B] int64                     modified: the bonus token
    num_pending       [B] int64                     modified: num_accepted_drafts + 1
    pending_tokens    [B, max_depth + 1] int64      modified: the token after each accepted node
    pending_features  [B, max_depth + 1, H]         modified: the feature of each accepted node
    num_missed        [B] int64                     modified: += num_pending as it was
    missed_tokens     [B, M] int64                  modified: the pending tokens are appended to the first num_missed ones
    missed_features   [B, M, H]                     modified: likewise

    Past the path: the root's token and feature. An inactive row stays as it is.
    """
    for b in range(tokens.shape[0]):
        if not active[b]:
            continue
        if num_missed is not None:
            missed, pending = int(num_missed[b]), int(num_pending[b])
            missed_tokens[b, missed : missed + pending] = pending_tokens[b, :pending]
            missed_features[b, missed : missed + pending] = pending_features[b, :pending]
            num_missed[b] += pending
        count = int(accepted.num_accepted_drafts[b]) + 1
        path = [max(int(node), 0) for node in accepted.accepted_nodes[b]]
        for i, node in enumerate(path):
            pending_features[b, i] = features[b, node]
            pending_tokens[b, i] = tokens[b, path[i + 1]] if i + 1 < count else tokens[b, 0]
        pending_tokens[b, count - 1] = accepted.bonus_token[b]
        num_pending[b] = count
        root_tokens[b] = accepted.bonus_token[b]
        seq_lens[b] += count
