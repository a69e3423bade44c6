"""Greedy `generate` of transformers in a process of its own: its memory is not ours, and the two can take turns."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

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


def load_model(target: str | Path, dtype):
    """The target as a model of transformers, its tensors those of our checkpoint."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from eagle_engine.checkpoint import open_checkpoint
    from eagle_engine.rope import rope_inverse_frequencies

    checkpoint = open_checkpoint(target)
    c = checkpoint.config
    fields = dict(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings,
        attention_bias=c.qkv_bias,
        mlp_bias=c.mlp_bias,
        sliding_window=c.sliding_window or None,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    if c.architecture.startswith("qwen"):
        fields |= dict(use_sliding_window=c.sliding_window > 0, max_window_layers=0)
    if c.num_experts:
        fields |= dict(num_local_experts=c.num_experts, num_experts_per_tok=c.num_experts_per_token)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(c.architecture, **fields), dtype=dtype)
    tensors = _stack_experts({name: checkpoint.tensor(name).to(dtype) for name in checkpoint.names()}, c.num_layers, c.num_experts)
    if c.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    # Covers every kind of RoPE scaling: the frequencies are ours, the tables are made from them.
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.original_inv_freq = rope_inverse_frequencies(c).float()
    model.generation_config = GenerationConfig(do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0)
    return model.eval()


def _stack_experts(tensors: dict, num_layers: int, num_experts: int) -> dict:
    """Mixtral's experts as transformers holds them: all of a layer in one tensor."""
    import torch

    if not num_experts:
        return tensors
    for i in range(num_layers):
        old, new = f"model.layers.{i}.block_sparse_moe.", f"model.layers.{i}.mlp."
        w1, w2, w3 = ([tensors.pop(f"{old}experts.{e}.{name}.weight") for e in range(num_experts)] for name in ("w1", "w2", "w3"))
        tensors[new + "experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(w1, w3)])
        tensors[new + "experts.down_proj"] = torch.stack(w2)
        tensors[new + "gate.weight"] = tensors.pop(old + "gate.weight")
    return tensors


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

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(int(threads))
        model = load_model(target, getattr(torch, dtype)).to(device)
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
