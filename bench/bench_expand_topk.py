"""expand_topk, one launch per draft level, against PyTorch's topk of the scores and gather of the features from ready candidates. Also expand on the CPU, from whole logits."""

import torch
from cases import WORKLOADS, Calls, Case, activation_dtype, main, on, under_pytest
from tree_inputs import draft_pool

from eagle_kernels import DraftPool, expand, expand_topk, head_topk, pack_weight
from eagle_kernels.head_topk import HEAD_TILE


def num_tiles(draft_vocab: int, device: str) -> int:
    return -(-draft_vocab // HEAD_TILE) if device == "cuda" else 1


def cases(device: str) -> list[Case]:
    result, dtype = [], activation_dtype(device)
    for name, (model, tree) in WORKLOADS.items():
        k, frontier, words = tree.top_k, tree.top_k, ((tree.max_depth - 1) * tree.top_k + 63) // 64

        def inputs(model=model, tree=tree, k=k, frontier=frontier, words=words) -> tuple[torch.Tensor, ...]:
            """Scores, pool indices, features and mask of a frontier, and a pool."""
            return on(
                device, torch.zeros(1, frontier), torch.arange(frontier, dtype=torch.int32)[None], torch.randn(1, frontier, model.hidden).to(dtype), torch.zeros(1, frontier, words, dtype=torch.int64),
                *draft_pool(tree, model.vocab),
            )  # fmt: skip

        def from_head(i: int, model=model, tree=tree, k=k, frontier=frontier, inputs=inputs) -> Calls:
            scores, index, features, mask, *pool = inputs()
            pool = DraftPool(*pool)
            # Of the head only the shape of what it keeps matters, so its inputs are narrow.
            head = head_topk(torch.randn(1, frontier, 64, device=device).to(dtype), pack_weight(torch.randn(tree.draft_vocab, 64, device=device).to(dtype)), k)
            values = torch.rand(1, frontier, k, device=device)

            def baseline() -> tuple[torch.Tensor, torch.Tensor]:
                best, chosen = (values + scores[:, :, None]).flatten(1).topk(k)
                return best, features.gather(1, (chosen // k)[:, :, None].expand(-1, -1, model.hidden))

            return Calls(lambda: expand_topk(head, scores, index, features, mask, pool, k, k, first_row=k, next_size=k), baseline)

        def from_logits(i: int, model=model, tree=tree, k=k, frontier=frontier, inputs=inputs) -> Calls:
            scores, index, features, mask, *pool = inputs()
            logits = torch.randn(1, frontier, tree.draft_vocab, device=device)

            def baseline() -> tuple[torch.Tensor, ...]:
                values, ids = torch.log_softmax(logits, -1).topk(k)
                best, chosen = (values + scores[:, :, None]).flatten(1).topk(k)
                return ids, best, features.gather(1, (chosen // k)[:, :, None].expand(-1, -1, model.hidden))

            return Calls(lambda: expand(logits, scores, index, features, mask, DraftPool(*pool), k, k, first_row=k, next_size=k), baseline)

        # Of each tile top_k keys, a maximum and a sum; features read and written.
        tiles = num_tiles(tree.draft_vocab, device)
        result.append(Case("expand_topk", name, frontier * tiles * 8 * (k + 1) + 2 * k * model.hidden * dtype.itemsize, 0, from_head))
        if device == "cpu":
            result.append(Case("expand", name, 4 * frontier * tree.draft_vocab + 2 * k * model.hidden * dtype.itemsize, 0, from_logits))
    return result


def test_expand_topk(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main(__doc__, cases)
