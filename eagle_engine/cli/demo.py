"""eagle demo: one prompt, plain and speculative, side by side."""

from __future__ import annotations

import argparse
import textwrap
import time

from eagle_engine.cli.common import describe_models, describe_sampling, encode_turns, load_engine, note, print_json, sampling_params
from eagle_engine.cli.output_json import output_as_json
from eagle_engine.errors import EagleError
from eagle_engine.outputs import RequestOutput
from eagle_engine.sampling_params import SamplingParams


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, default_seed=0)
    if args.draft == "none":
        raise EagleError("demo compares plain with speculative decoding: --draft none leaves nothing to compare")
    note("loading the models (the demo target is downloaded on first use, 98 MB)" if args.target == "demo" else "loading the models")
    started = time.perf_counter()
    engine = load_engine(args)
    plain_engine = engine.plain()
    prompt = encode_turns(engine, [args.prompt], raw=False)
    note(f"loaded in {time.perf_counter() - started:.1f} s")
    warm_up = SamplingParams(temperature=0.0, max_tokens=8)
    plain_engine.generate([prompt], warm_up)
    engine.generate([prompt], warm_up)
    plain = _answer(plain_engine, prompt, params)
    speculative = _answer(engine, prompt, params)
    same = plain.token_ids == speculative.token_ids and plain.text == speculative.text
    speedup = speculative.stats.tokens_per_second / plain.stats.tokens_per_second
    if args.json:
        print_json({"same_tokens": same, "speedup": speedup, "prompt": args.prompt, "plain": output_as_json(plain), "speculative": output_as_json(speculative)})
        return 0 if same else 1
    print(f"\n{describe_models(args, engine)}; {describe_sampling(params)}")
    print(f"\nprompt: {args.prompt}\n")
    print(textwrap.indent(speculative.text, "  "))
    print(f"\nplain decoding        {plain.stats.tokens_per_second:6.1f} tokens/s   {len(plain.token_ids)} tokens, one per step")
    how = f"{len(speculative.token_ids)} tokens in {speculative.stats.steps} steps, acceptance length {speculative.stats.acceptance_length:.2f}"
    print(f"speculative decoding  {speculative.stats.tokens_per_second:6.1f} tokens/s   {how}")
    print(f"speedup               {speedup:6.2f} x")
    print(f"same tokens           {'yes' if same else 'NO: this is a bug, please report it with the output of eagle verify'}")
    return 0 if same else 1


def _answer(engine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    output = engine.generate([prompt], params)[0]
    if output.error is not None:
        raise EagleError(output.error)
    return output
