"""accept on the longest walk, and accept_rejection with the same distribution everywhere, which accepts at once. No single PyTorch expression does the same, so there is no comparison."""

import torch
from cases import WORKLOADS, Calls, Case, main, on, under_pytest
from tree_inputs import longest_walk, reranked

from eagle_kernels import accept, accept_rejection


def cases(device: str) -> list[Case]:
    result = []
    for name, (model, tree) in WORKLOADS.items():
        grown = reranked(tree, model.vocab)
        host = (grown.tokens, grown.parent, longest_walk(grown), torch.ones(1, dtype=torch.bool))
        # No stop token, so that every call walks the whole path.
        extra = (torch.full((1, 4), -1), torch.zeros(1, 65, dtype=torch.int64))

        def plain(i: int, host=host, tree=tree) -> Calls:
            tokens, parent, sampled, active = on(device, *host)
            return Calls(lambda: accept(tokens, parent, sampled, active, tree.max_depth))

        def whole(i: int, host=host, extra=extra, tree=tree) -> Calls:
            tokens, parent, sampled, active, stops, ring = on(device, *host, *extra)
            return Calls(lambda: accept(tokens, parent, sampled, active, tree.max_depth, stop_token_ids=stops, output_ring=ring))

        def rejection(i: int, grown=grown, host=host, tree=tree, vocab=model.vocab) -> Calls:
            tokens, parent, _, active = on(device, *host)
            probs = torch.full((1, tree.nodes, vocab), 1.0 / vocab, device=device)
            draft_probs = probs.clone()
            seeds, positions = on(device, torch.tensor([3]), torch.tensor([100]))
            return Calls(lambda: accept_rejection(tokens, parent, probs, draft_probs, seeds, positions, active, tree.max_depth))

        num_bytes = 20 * tree.nodes  # a token, a parent and a drawn token each
        result += [Case("accept", name, num_bytes, 0, plain), Case("accept", f"{name} with stops and ring", num_bytes, 0, whole)]
        # The first child is accepted at every node of the walk; the distributions after its last node are read whole, for the bonus token.
        depth = int(grown.depth.max())
        result.append(Case("accept_rejection", name, 20 * tree.nodes + 8 * depth + 4 * model.vocab, 0, rejection))
    return result


def test_accept(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main(__doc__, cases)
