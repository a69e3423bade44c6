"""The loop: forward, backward, update, metrics, checkpoints."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn
from tqdm import tqdm

from eagle_engine.errors import EagleError
from eagle_engine.training.batches import Batches
from eagle_engine.training.config import TrainConfig
from eagle_engine.training.objective import Sums, UnrolledObjective
from eagle_engine.training.whole_file import write_whole

KEPT_CHECKPOINTS = 2
_POSITION = "position.json"


@dataclass
class Position:
    """How far a run is: updates made, supervised tokens learned from (each counted once per pass), seconds spent in the loop."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Of update number `step` (from 0): linear warm-up, then half a cosine down to final_learning_rate of the greatest."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    low = config.final_learning_rate
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def optimiser_of(drafter: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    vectors = [p for p in drafter.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=config.weight_decay), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def summary(sums: Sums) -> dict:
    """Metrics of sums: acceptance by depth is the share of the drafts at depth 1, 2, ... that are the target's choice, among those whose ancestors all are; expected length that of a chain of so many
    drafts, plus one."""
    shares = [accepted / reached if reached else 0.0 for accepted, reached in zip(sums.accepted.tolist(), sums.reached.tolist())]
    rows = [max(1.0, count) for count in sums.rows.tolist()]
    return {
        "token_loss": sums.token_loss[0].item() / rows[0],
        "feature_loss": sums.feature_loss[0].item() / rows[0],
        "acceptance_by_depth": shares,
        "chain_length": 1.0 + sum(math.prod(shares[: i + 1]) for i in range(len(shares))),
    }


class Trainer:
    """One run on prepared models and data.

    run_directory  checkpoints/, metrics.jsonl and tensorboard/ are kept there
    fingerprint    of target, data and settings; a checkpoint with another one is refused
    """

    def __init__(
        self, config: TrainConfig, accelerator: Accelerator, objective: UnrolledObjective, batches: Batches, run_directory: Path, fingerprint: dict[str, str], *, progress: bool = True
    ) -> None:
        self.config, self.accelerator, self.batches, self.directory, self.fingerprint = config, accelerator, batches, run_directory, fingerprint
        self.progress = progress and accelerator.is_main_process
        self.model, self.optimiser = accelerator.prepare(objective, optimiser_of(objective.drafter, config))
        self.total_steps = max(1, int(config.epochs * len(batches.epoch(0)) / config.gradient_accumulation))
        self.position = Position()
        self._resume()

    def run(self) -> bool:
        """Train to the end, or until the time is over or the process is asked to end; whether the end was reached."""
        config, accelerator, position = self.config, self.accelerator, self.position
        started = time.monotonic() - position.seconds
        deadline = None if config.stop_after_minutes is None else time.monotonic() + 60 * config.stop_after_minutes
        batches = self.batches.from_position(position.step * config.gradient_accumulation)
        window: list[Sums] = []
        losses: list[torch.Tensor] = []
        with self._metrics() as write, _asked_to_stop() as asked, tqdm(total=self.total_steps, initial=position.step, desc="training", unit="update", disable=not self.progress) as bar:
            if position.step == 0:
                write({"step": 0, "tokens": 0, "held_out": self.evaluate()})
            self.model.train()
            while position.step < self.total_steps:
                rate = learning_rate(config, position.step, self.total_steps)
                for group in self.optimiser.param_groups:
                    group["lr"] = rate
                places = []
                for part in range(config.gradient_accumulation):
                    place, batch = next(batches)
                    places.append(place)
                    # Gradients are exchanged between processes at the last part alone.
                    last = part == config.gradient_accumulation - 1
                    with nullcontext() if last else accelerator.no_sync(self.model):
                        loss, sums = self.model(batch.to(accelerator.device), self._noise_seed(position.step, part))
                        accelerator.backward(loss / config.gradient_accumulation)
                    window.append(sums)
                    losses.append(loss.detach())
                norm = accelerator.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
                if not math.isfinite(float(norm)):
                    raise EagleError(self._not_finite(places, losses[-config.gradient_accumulation :]))
                self.optimiser.step()
                self.optimiser.zero_grad(set_to_none=True)
                position.step += 1
                position.seconds = time.monotonic() - started
                bar.update()
                at_end = position.step == self.total_steps
                if position.step % config.log_steps == 0 or at_end:
                    line = self._log_line(window, losses, rate, float(norm))
                    write(line)
                    bar.set_postfix_str(f"loss {line['loss']:.3f}, acceptance " + " ".join(f"{share:.2f}" for share in line["acceptance_by_depth"]))
                    window, losses = [], []
                if position.step % config.evaluate_steps == 0 or at_end:
                    write({"step": position.step, "tokens": position.tokens, "held_out": self.evaluate()})
                    self.model.train()
                stop = self._agree(asked() or (deadline is not None and time.monotonic() > deadline))
                if position.step % config.checkpoint_steps == 0 or at_end or stop:
                    # What a checkpoint says must not depend on where in a window of metrics it fell.
                    if window:
                        position.tokens += int(self._over_processes(_total(window)).rows[0])
                    window, losses = [], []
                    self._save()
                if stop and not at_end:
                    return False
        return True

    @torch.no_grad()
    def evaluate(self) -> dict:
        """Metrics of the held-out conversations."""
        self.model.eval()
        drafter_loss = self.accelerator.unwrap_model(self.model)
        parts = [drafter_loss(batch.to(self.accelerator.device))[1] for batch in self.batches.held_out()]
        return summary(self._over_processes(_total(parts)))

    def weights(self) -> dict[str, torch.Tensor]:
        """Published name -> tensor, whole on every process."""
        state = self.accelerator.get_state_dict(self.model)
        return {name.removeprefix("drafter.weights.").replace("/", "."): tensor for name, tensor in state.items()}

    def _log_line(self, window: list[Sums], losses: list[torch.Tensor], rate: float, norm: float) -> dict:
        position = self.position
        total = self._over_processes(_total(window))
        position.tokens += int(total.rows[0])
        loss = self.accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        return {
            "step": position.step, "tokens": position.tokens, "seconds": round(position.seconds, 3), "loss": loss.item(), "learning_rate": rate, "gradient_norm": norm,
        } | summary(total)  # fmt: skip

    def _over_processes(self, sums: Sums) -> Sums:
        return Sums(*self.accelerator.reduce(torch.stack(list(sums)), reduction="sum"))

    def _agree(self, stop: bool) -> bool:
        """Whether any process was asked to stop."""
        if self.accelerator.num_processes == 1:
            return stop
        return bool(self.accelerator.reduce(torch.tensor(float(stop), device=self.accelerator.device), reduction="sum") > 0)

    def _noise_seed(self, step: int, part: int) -> int:
        return hash((self.config.seed, step, part, self.accelerator.process_index)) & (1 << 62) - 1

    def _not_finite(self, places: list, losses: list[torch.Tensor]) -> str:
        ids = [str(self.batches.data.ids[number]) for place in places for row in place.rows for number in row]
        kept = checkpoints(self.directory)
        last = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        values = ", ".join(f"{loss.item():g}" for loss in losses)
        return (
            f"the gradient is not finite at update {self.position.step + 1} (epoch {places[0].epoch + 1}, batch {places[0].number + 1}, loss {values}); {last}. Conversations of the batch: {', '.join(ids[:8])}"
            + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
            + ". Lower learning_rate, or look at these conversations"
        )

    def _save(self) -> None:
        """A checkpoint under its final name only when it is complete."""
        name = f"step-{self.position.step:08d}"
        directory, partial = self.directory / "checkpoints" / name, self.directory / "checkpoints" / (name + ".partial")
        main = self.accelerator.is_main_process
        try:
            if main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self.accelerator.save_state(str(partial))
            self.accelerator.wait_for_everyone()
            if main:
                (partial / _POSITION).write_text(json.dumps(self.position.__dict__ | {"fingerprint": self.fingerprint, "processes": self.accelerator.num_processes}))
                shutil.rmtree(directory, ignore_errors=True)
                partial.rename(directory)
                for old in checkpoints(self.directory)[:-KEPT_CHECKPOINTS]:
                    shutil.rmtree(old)
        except (OSError, RuntimeError) as error:
            # torch reports a full disk as a RuntimeError of its archive writer.
            if main:
                shutil.rmtree(partial, ignore_errors=True)
            free = shutil.disk_usage(self.directory).free
            raise EagleError(f"the checkpoint {directory} cannot be written ({free / 1e6:.0f} MB are free): {error}; earlier checkpoints are kept") from error
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        kept = checkpoints(self.directory)
        if not kept:
            return
        damaged = f"{kept[-1]} cannot be read: {{}}; remove it, and the run goes on from the checkpoint before it, or from the start"
        try:
            recorded = json.loads((kept[-1] / _POSITION).read_text())
        except (OSError, ValueError) as error:
            raise EagleError(damaged.format(error)) from error
        for name, value in self.fingerprint.items():
            # What an older version did not record is not compared.
            if recorded["fingerprint"].get(name, value) != value:
                raise EagleError(f"{kept[-1]} is a checkpoint of another {name}: give the old one, or another run directory")
        if recorded["processes"] != self.accelerator.num_processes:
            raise EagleError(f"{kept[-1]} was written by {recorded['processes']} processes, now there are {self.accelerator.num_processes}: the order of the data depends on their number")
        try:
            self.accelerator.load_state(str(kept[-1]))
        except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
            raise EagleError(damaged.format(error)) from error
        self.position = Position(**{name: recorded[name] for name in Position.__dataclass_fields__})

    @contextmanager
    def _metrics(self):
        """write(line): append to metrics.jsonl and TensorBoard. Lines past the checkpoint that the run goes on from are dropped."""
        if not self.accelerator.is_main_process:
            yield lambda line: None
            return
        from torch.utils.tensorboard import SummaryWriter

        path = self.directory / "metrics.jsonl"
        lines = [line for line in read_metrics(path) if line["step"] <= self.position.step] if self.position.step else []
        write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
        board = SummaryWriter(str(self.directory / "tensorboard"), purge_step=self.position.step + 1)
        with open(path, "a") as file:

            def write(line: dict) -> None:
                file.write(json.dumps(line) + "\n")
                file.flush()
                group = "held_out" if "held_out" in line else "train"
                for name, value in (line.get("held_out") or line).items():
                    if name == "acceptance_by_depth":
                        for depth, share in enumerate(value, start=1):
                            board.add_scalar(f"{group}/acceptance_depth_{depth}", share, line["step"])
                    elif name not in ("step", "seconds"):
                        board.add_scalar(f"{group}/{name}", value, line["step"])

            with closing(board):
                yield write


def _total(parts: list[Sums]) -> Sums:
    return Sums(*(torch.stack(tensors).sum(0) for tensors in zip(*parts)))


def read_metrics(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl; a last one that was not finished is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def checkpoints(run_directory: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    return sorted(path for path in (run_directory / "checkpoints").glob("step-*") if not path.name.endswith(".partial"))


@contextmanager
def _asked_to_stop():
    """asked(): whether the process was sent SIGTERM or SIGINT. The first one lets the update in hand end and a checkpoint be written; a second SIGINT interrupts."""
    received: list[int] = []
    previous: dict[int, Callable | int | None] = {}

    def receive(number, frame) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, receive)
    except ValueError:
        pass  # not the main thread: nobody can signal it
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
