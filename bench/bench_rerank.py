"""rerank against PyTorch's topk and sort of the scores, which find the nodes but neither parents, depths, masks nor positions."""

import torch
from cases import WORKLOADS, Calls, Case, main, on, under_pytest
from tree_inputs import PREFIX, draft_pool, pool_size

from eagle_kernels import DraftPool, rerank


def cases(device: str) -> list[Case]:
    result = []
    for name, (model, tree) in WORKLOADS.items():
        host = draft_pool(tree, model.vocab)

        def make(i: int, host=host, tree=tree) -> Calls:
            pool = DraftPool(*on(device, *host))
            root, seq_lens = on(device, torch.tensor([5]), torch.tensor([PREFIX], dtype=torch.int32))
            return Calls(lambda: rerank(pool, root, seq_lens, tree.nodes), lambda: pool.scores.topk(tree.nodes - 1).indices.sort())

        # A candidate is a token, a score and a parent; a node a token, a parent, a depth, a mask word and a position.
        result.append(Case("rerank", name, 16 * pool_size(tree) + 32 * tree.nodes, 0, make))
    return result


def test_rerank(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main(__doc__, cases)
