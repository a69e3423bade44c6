"""A whole training run: prompts to answers, conversations to states, states to a drafter, a drafter to a report."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch import Tensor

from eagle_engine.checkpoint import Checkpoint, open_checkpoint
from eagle_engine.demo import demo_target_path
from eagle_engine.drafter_checkpoint import read_drafter, target_ids
from eagle_engine.drafter_config import DrafterConfig
from eagle_engine.errors import EagleError
from eagle_engine.loading import DEMO, weights_dtype
from eagle_engine.model_config import ModelConfig
from eagle_engine.tokenizer import Tokenizer
from eagle_engine.training.answers import ChatPrompt, read_answers, write_answers
from eagle_engine.training.batches import Batches
from eagle_engine.training.config import TrainConfig, check_same_run
from eagle_engine.training.conversations import LeftOut, conversation_of, read_files, sample_by_category
from eagle_engine.training.dataset import TokenData, build_data
from eagle_engine.training.export import draft_vocab_of, export
from eagle_engine.training.loop import Trainer, checkpoints
from eagle_engine.training.model import TrainableDrafter, initialise
from eagle_engine.training.objective import UnrolledObjective
from eagle_engine.training.target_states import CachedStates, LiveStates, cache_states
from eagle_engine.training.whole_file import write_whole

_LONGEST_WAIT = timedelta(days=7)  # of processes for the one that answers prompts and computes states
_LARGEST_DEFAULT_VOCAB = 32_000  # of EAGLE-3, as published


class Outcome(NamedTuple):
    """drafter: directory of the drafter as it is. finished: it is trained to the end and described; else the run stopped at a checkpoint and the same command goes on. acceptance_length: measured by the
    engine, None if it was not."""

    finished: bool
    drafter: Path
    acceptance_length: float | None = None


def train(config: TrainConfig, *, progress: bool = True, say=print) -> Outcome:
    """Run, or go on with, the training that `config` describes. say: takes lines for the user."""
    out = Path(config.out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EagleError("device cuda was asked for, but torch finds no GPU; use device cpu or auto")
    bf16 = config.precision == "bfloat16" or (config.precision == "auto" and not on_cpu)
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="bf16" if bf16 else "no", kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False), InitProcessGroupKwargs(timeout=_LONGEST_WAIT)])
    _check_distribution(accelerator)
    say = say if accelerator.is_main_process else lambda line: None
    progress = progress and accelerator.is_main_process
    _check_settings(config, out, accelerator, say)

    checkpoint = open_checkpoint(demo_target_path(progress) if config.target == DEMO else config.target)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    # What does not fit is said before the target spends hours on answers.
    drafter_config = drafter_config_of(config, checkpoint.config)
    captured_layers = drafter_config.captured_layers(checkpoint.config.num_layers)
    start = _read_start(config, drafter_config) if config.start_from is not None and not checkpoints(out) else None
    # The steps that make files are one process's; the others wait and read them.
    with accelerator.main_process_first():
        data = _data(config, out, tokenizer, checkpoint.config.max_position_embeddings, progress, say)
    parts = target_parts(checkpoint)
    target_name, target_weights = _fingerprint(checkpoint.config, parts.embedding), _weights_fingerprint(checkpoint)
    with accelerator.main_process_first():
        states = _states(config, out, checkpoint, captured_layers, data, {"target": target_name, "target weights": target_weights}, accelerator, progress)

    counts = data.count(checkpoint.config.vocab_size)
    limited = drafter_config.has_own_vocab or config.draft_vocab_size is not None
    draft_vocab = draft_vocab_of(counts, drafter_config.draft_vocab_size or config.draft_vocab_size) if limited else None
    target_head = parts.head if draft_vocab is None else parts.head[draft_vocab]
    drafter = TrainableDrafter(drafter_config, getattr(torch, config.export_dtype))
    initialise(drafter, config.seed, parts.norm, target_head)
    if start is not None:
        _start_from(drafter, start, draft_vocab)
    product_dtype = torch.bfloat16 if bf16 else torch.float32
    objective = UnrolledObjective(
        drafter, parts.embedding.to(product_dtype), target_head.to(product_dtype), draft_vocab, steps=config.unroll_steps, decay=config.unroll_decay,
        token_weight=config.token_loss_weight, feature_weight=config.feature_loss_weight, noise=config.feature_noise, row_length=config.max_length,
    )  # fmt: skip
    batches = Batches(
        data, states, max_length=config.max_length, batch_size=config.batch_size, seed=config.seed, process=accelerator.process_index, num_processes=accelerator.num_processes
    )
    covered = 1.0 if draft_vocab is None else counts[draft_vocab.numpy()].sum() / max(1, counts.sum())
    say(
        f"EAGLE-{'1/2' if config.version == 1 else 3} drafter of {sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M weights; {len(data)} conversations, {data.held_out.sum()} of them held out; "
        f"{counts.sum()} tokens to learn from, {100 * covered:.1f} % of them in the draft vocabulary"
    )
    trainer = Trainer(config, accelerator, objective, batches, out, {"target": target_name, "target weights": target_weights, "data": data.fingerprint}, progress=progress)
    say(f"{trainer.total_steps} updates" + (f", going on after {trainer.position.step}" if trainer.position.step else ""))
    finished, weights = trainer.run(), trainer.weights()
    if accelerator.is_main_process:
        export(out / "drafter", drafter_config, weights, config.export_dtype, draft_vocab, counts)
    if not finished:
        say(f"stopped after update {trainer.position.step} of {trainer.total_steps}; the drafter so far is in {out / 'drafter'}, and the same command goes on from there")
    if not finished or not accelerator.is_main_process:
        return Outcome(finished, out / "drafter")
    from eagle_engine.training.report import write_report

    length = write_report(config, out, drafter_config, data, trainer.position, covered, progress)
    say(f"drafter: {out / 'drafter'}")
    return Outcome(True, out / "drafter", length)


class TargetParts(NamedTuple):
    """embedding, head [V, H], norm [H], float32."""

    embedding: Tensor
    head: Tensor
    norm: Tensor


def target_parts(checkpoint: Checkpoint) -> TargetParts:
    """What the drafter shares with its target."""
    embedding = checkpoint.tensor("model.embed_tokens.weight").float()
    head = embedding if checkpoint.config.tie_word_embeddings else checkpoint.tensor("lm_head.weight").float()
    return TargetParts(embedding, head, checkpoint.tensor("model.norm.weight").float())


def drafter_config_of(config: TrainConfig, target: ModelConfig) -> DrafterConfig:
    """The drafter that a run trains: the target's sizes where none are given. Rotary base as the target's, without scaling: published readers know no more."""
    hidden = config.hidden_size or target.hidden_size
    heads = config.num_heads or (target.num_heads if hidden == target.hidden_size else max(1, hidden // target.head_dim))
    kv_heads = config.num_kv_heads or (target.num_kv_heads if heads == target.num_heads else heads)
    # The readers of EAGLE-1/2 know no head_dim: it is hidden_size / num_heads there.
    head_dim = hidden // heads if config.version == 1 or heads != target.num_heads else target.head_dim
    if hidden % heads and config.version == 1:
        raise EagleError(f"num_heads {heads} does not divide hidden_size {hidden}, as an EAGLE-1/2 drafter needs")
    layer = ModelConfig(
        architecture="llama", hidden_size=hidden, intermediate_size=config.intermediate_size or target.intermediate_size, num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        vocab_size=target.vocab_size, rms_norm_eps=target.rms_norm_eps, rope_theta=target.rope_theta, max_position_embeddings=target.max_position_embeddings, bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )  # fmt: skip
    if config.draft_vocab_size is not None and config.draft_vocab_size > target.vocab_size:
        raise EagleError(f"draft_vocab_size {config.draft_vocab_size} is more than the target's vocabulary of {target.vocab_size}")
    if config.version == 1:
        return DrafterConfig(1, layer, hidden, bias=True)
    drafter = DrafterConfig(
        3, layer, target.hidden_size, draft_vocab_size=config.draft_vocab_size or min(_LARGEST_DEFAULT_VOCAB, target.vocab_size),
        captured_layer_ids=None if config.captured_layers is None else tuple(config.captured_layers), fc_norm=config.fc_norm, norm_output=config.norm_output, norm_before_residual=config.norm_before_residual,
    )  # fmt: skip
    if target.num_layers in drafter.captured_layers(target.num_layers):
        raise EagleError(f"captured layer {target.num_layers}, the output of the last layer before the final norm, cannot be trained on: transformers does not hand it over")
    return drafter


def _check_distribution(accelerator: Accelerator) -> None:
    """DDP and FSDP 2 keep weights that go by their names; what else accelerate knows does not."""
    kind = accelerator.distributed_type
    if kind != DistributedType.FSDP and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise EagleError(f"FSDP was asked for, but this is one process or has no GPU, and accelerate runs as {kind.value}: use several GPUs, or leave FSDP out")
    if kind == DistributedType.FSDP and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise EagleError("FSDP of version 1 was asked for, which is what accelerate takes when nothing is said: set fsdp_version: 2 (--fsdp_version 2)")
    if kind not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.FSDP):
        raise EagleError(f"accelerate runs as {kind.value}: drafters are trained on one process, with DDP or with FSDP")


def _check_settings(config: TrainConfig, out: Path, accelerator: Accelerator, say) -> None:
    """Record the settings of a new run; compare those of one that goes on. The data of a run are made once: config.data becomes what they were made from."""
    path = out / "config.json"
    if accelerator.is_main_process:
        if path.is_file():
            try:
                recorded = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise EagleError(f"{path} is damaged ({error}): remove it if the settings are the ones that the run was started with") from error
            check_same_run(config, recorded, out)
            if (out / "data.npz").is_file():
                if config.data and config.data != recorded["data"]:
                    say(f"the run goes on with its own data, made from {', '.join(recorded['data'])}; other files need another run directory")
                config.data = recorded["data"]
            elif (out / "answers.jsonl").is_file() and config.target != recorded["target"]:
                raise EagleError(f"{out / 'answers.jsonl'} holds answers of target {recorded['target']}, now it is {config.target}: give the old one, or another run directory")
        write_whole(path, json.dumps(config.to_dict(), indent=1) + "\n")
    accelerator.wait_for_everyone()
    if not path.is_file():
        raise EagleError(f"{path}, which the first process has written, is not here: several machines need a run directory that all of them share")


def _data(config: TrainConfig, out: Path, tokenizer: Tokenizer, max_positions: int, progress: bool, say) -> TokenData:
    """The data of the run, made on its first start: files read, prompts answered, everything encoded, split."""
    path = out / "data.npz"
    if path.is_file():
        return TokenData.load(path)
    if not config.data:
        raise EagleError("data: give at least one file of conversations or prompts")
    left_out = LeftOut()
    conversations, prompts = read_files([Path(name).expanduser() for name in config.data], tokenizer, left_out)
    if prompts:
        prompts = sample_by_category(prompts, config.num_prompts, config.seed)
        say(f"{len(prompts)} prompts are answered by the target")
        for name, reason in _answer(config, out, prompts, min(config.max_length, max_positions), progress).items():
            left_out.add("the prompt could not be answered", f"{name}: {reason}")
        wanted = {prompt.id for prompt in prompts}
        for answer in read_answers(out / "answers.jsonl"):
            if answer.id in wanted and answer.token_ids:
                conversations.append(conversation_of(answer))
    data = build_data(conversations, min(config.max_length, max_positions), config.validation_share, left_out)
    for line in left_out.lines():
        say(line)
    # data.npz is the last: with it this step is done.
    write_whole(out / "left_out.json", json.dumps(dict(left_out.counts), indent=1) + "\n")
    data.save(path)
    return data


def _answer(config: TrainConfig, out: Path, prompts: list[ChatPrompt], max_length: int, progress: bool) -> dict[str, str]:
    """id -> why, of the prompts that could not be answered."""
    from eagle_engine.engine import Engine

    longest = max(len(prompt.token_ids) for prompt in prompts)
    engine = Engine.from_pretrained(
        config.target, None, device=config.device, threads=config.threads, progress=progress, max_batch_size=config.answer_batch_size, max_model_len=min(max_length, longest + config.max_new_tokens + 1)
    )
    return write_answers(engine, prompts, out / "answers.jsonl", temperatures=config.temperatures, max_new_tokens=config.max_new_tokens, seed=config.seed, progress=progress)


def _states(
    config: TrainConfig, out: Path, checkpoint: Checkpoint, captured_layers: tuple[int, ...], data: TokenData, target: dict[str, str], accelerator: Accelerator, progress: bool
) -> CachedStates | LiveStates:
    dtype = weights_dtype(config.target_dtype, checkpoint.config.dtype, checkpoint.gguf_metadata is not None, accelerator.device)

    def make_source(captured_layers: tuple[int, ...]) -> LiveStates:
        from eagle_engine.transformers_model import load_model

        return LiveStates(load_model(checkpoint, dtype).to(accelerator.device), captured_layers, getattr(torch, config.states_dtype))

    if config.states == "live":
        return make_source(captured_layers)
    description = target | {"dtype": config.states_dtype, "target dtype": str(dtype).removeprefix("torch.")}
    directory = out / "states" if config.states_directory is None else Path(config.states_directory).expanduser()
    return cache_states(make_source, directory, data, captured_layers, description, progress)


def _read_start(config: TrainConfig, drafter_config: DrafterConfig) -> dict[str, Tensor]:
    """Weights of the drafter that a run starts from, if it is of the same kind; with "ids" [rows of its head], their target ids."""
    other, tensors = read_drafter(Path(config.start_from).expanduser())
    for name, shape in drafter_config.expected_tensors().items():
        theirs = tuple(tensors[name].shape) if name in tensors else None
        # A head over another vocabulary is taken by tokens.
        same = theirs is not None and theirs[1:] == shape[1:] if name == "lm_head.weight" else theirs == shape
        if not same and name not in ("d2t", "t2d"):
            has = "lacks it" if theirs is None else f"has {list(theirs)}"
            raise EagleError(f"start_from {config.start_from}: weight {name} is {list(shape)}, that drafter {has}: a run starts from a drafter of the same version and sizes")
    return tensors | {"ids": target_ids(tensors["d2t"]) if other.has_own_vocab else torch.arange(other.layer.vocab_size)}


@torch.no_grad()
def _start_from(drafter: TrainableDrafter, tensors: dict[str, Tensor], draft_vocab: Tensor | None) -> None:
    """Take the weights of another drafter; of its head, the rows of tokens that both draft."""
    for name, weight in drafter.named_weights().items():
        if name != "lm_head.weight":
            weight.copy_(tensors[name].float())
            continue
        theirs = {token: row for row, token in enumerate(tensors["ids"].tolist())}
        for row, token in enumerate(range(len(weight)) if draft_vocab is None else draft_vocab.tolist()):
            if token in theirs:
                weight[row] = tensors[name][theirs[token]].float()


def _fingerprint(config: ModelConfig, embedding: Tensor) -> str:
    """Of a target, wherever its files lie: its configuration and a part of its embedding."""
    digest = hashlib.sha256(repr(config).encode())
    digest.update(embedding[:: max(1, len(embedding) // 256)].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _weights_fingerprint(checkpoint: Checkpoint) -> str:
    """Of weights that a target has for itself, when it shares configuration and embedding with the one that it was tuned from: the final norm, and the queries and values of the last layer."""
    digest = hashlib.sha256()
    layer = f"model.layers.{checkpoint.config.num_layers - 1}.self_attn"
    for name in ("model.norm.weight", f"{layer}.q_proj.weight", f"{layer}.v_proj.weight"):
        digest.update(checkpoint.tensor(name).float().contiguous().numpy().tobytes())
    return digest.hexdigest()
