"""Greedy `generate` of transformers in a process of its own: its memory is not ours, and the two can take turns."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from eagle_engine.cli.common import note
from eagle_engine.errors import EagleError


class TransformersBaseline:
    """The parent's side: one line of JSON to the child and one back for each answer."""

    def __init__(self, args: argparse.Namespace, dtype: str, threads: int, device: str) -> None:
        from eagle_engine.demo import demo_target_path

        target = demo_target_path() if args.target == "demo" else args.target
        self._command = [sys.executable, "-m", "eagle_engine.cli.baseline", str(target), dtype.removeprefix("torch."), str(threads), device]

    def __enter__(self) -> TransformersBaseline:
        note("loading the same weights into transformers")
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._receive()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def generate(self, prompt: list[int], num_tokens: int) -> float:
        """Seconds for exactly num_tokens tokens after the prompt."""
        try:
            self._process.stdin.write(json.dumps({"prompt": prompt, "num_tokens": num_tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EagleError("the process that runs transformers has ended") from None
        return self._receive()["seconds"]

    def _receive(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise EagleError(f"the process that runs transformers has ended with status {self._process.wait()}")
        message = json.loads(line)
        if "error" in message:
            raise EagleError(f"transformers: {message['error']}")
        return message


def answer(model, prompt: list[int], num_tokens: int) -> list[int]:
    """Exactly num_tokens greedy tokens."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt], device=model.device)
        result = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    return result[0, len(prompt) :].tolist()


def serve(target: str, dtype: str, threads: str, device: str) -> None:
    """The child's side: "ready", then the seconds of each answer."""
    replies, sys.stdout = sys.stdout, sys.stderr

    def reply(message: dict) -> None:
        print(json.dumps(message), file=replies, flush=True)

    try:
        import torch
        import transformers

        from eagle_engine.checkpoint import open_checkpoint
        from eagle_engine.transformers_model import load_model

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(int(threads))
        model = load_model(open_checkpoint(target), getattr(torch, dtype)).to(device)
        reply({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            started = time.perf_counter()
            tokens = answer(model, request["prompt"], request["num_tokens"])
            seconds = time.perf_counter() - started
            if len(tokens) != request["num_tokens"]:
                raise RuntimeError(f"{len(tokens)} tokens instead of {request['num_tokens']}")
            reply({"seconds": seconds})
    except Exception as error:  # whatever it is, the parent reports it
        reply({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    try:
        serve(*sys.argv[1:])
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)
