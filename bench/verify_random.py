"""Plain against speculative decoding on a small random target, token for token: what `eagle verify` does, where no checkpoint is at hand. Exit status 1 when any tokens differ."""

from __future__ import annotations

import argparse

import torch
from random_models import random_drafter, random_target
from shapes import ModelShape

from eagle_engine import EagleConfig, Engine, SamplingParams

SMALL = ModelShape(4, 256, 512, 4, 2, 64, 2048)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    torch.manual_seed(0)
    # Both models follow the embedding of the last token, with noise of their own: drafts are often right, and often not.
    order = torch.randperm(SMALL.vocab)
    next_token = torch.empty_like(order)
    next_token[order] = order.roll(-1)
    target = random_target(SMALL, 1024, device=args.device, deterministic=True, next_token=next_token.to(args.device), update=2.5)
    drafter = random_drafter(target, SMALL, follows_embedding=True)
    config = EagleConfig(tree="dynamic", top_k=4, max_depth=3, num_nodes=12, max_model_len=512, max_batch_size=4, deterministic=True)
    engine = Engine(target, drafter, None, config, eos_token_ids=())
    plain = engine.plain()
    prompts = [torch.randint(0, SMALL.vocab, (7 + 41 * i,)).tolist() for i in range(args.prompts)]
    params = [SamplingParams(temperature=0.0 if i % 2 == 0 else 0.9, top_p=0.95 if i % 3 == 0 else 1.0, seed=i, max_tokens=args.max_new_tokens) for i in range(args.prompts)]
    expected = [plain.generate([prompt], param)[0].token_ids for prompt, param in zip(prompts, params)]
    outputs = engine.generate(prompts, params)
    same = sum(output.token_ids == tokens for output, tokens in zip(outputs, expected))
    lengths = ", ".join(f"{output.stats.acceptance_length:.2f}" for output in outputs)
    print(f"{same}/{args.prompts} identical, {args.max_new_tokens} tokens each, half of them sampled; acceptance lengths {lengths}")
    return 0 if same == args.prompts else 1


if __name__ == "__main__":
    raise SystemExit(main())
