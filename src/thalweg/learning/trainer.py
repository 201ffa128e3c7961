"""The training loop: readable, resumable to the bit, stopped cleanly by Ctrl-C."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ThalwegError
from thalweg.files import making_sense
from thalweg.learning.accumulation import Accumulated, Parts
from thalweg.learning.checkpoint import (
    LAST,
    MODEL,
    Checkpoint,
    flatten_optimiser,
    load_checkpoint,
    restore_optimiser,
    save_checkpoint,
)
from thalweg.learning.interrupts import interruptible
from thalweg.learning.optimisers import Plateau, learning_rate_factor
from thalweg.learning.progress import Progress
from thalweg.learning.settings import Moment, TrainerConfig
from thalweg.metrics import metric_direction

Listener = Callable[[dict[str, Any]], None]
B = TypeVar("B", covariant=True)

# Steps between two looks at the loss where a look makes the accelerator wait.
LOOK_EVERY = 50


class Batched(Protocol[B]):
    """Training data: a fixed number of batches an epoch, reproducible by epoch, resumable in its middle."""

    def __len__(self) -> int: ...

    def iterate(self, n: int, start: int = 0) -> Iterator[B]:
        """Batches of epoch ``n`` from number ``start`` on."""
        ...


class Watch(Protocol):
    """Looks at some steps of a training without changing them; what it finds is passed to the listener."""

    every: int

    def begin(self, model: nn.Module) -> None:
        """Before the step's first call of the model."""
        ...

    def gradients(self, scale: float = 1.0) -> None:
        """After the backward pass, before clipping; ``scale`` is what the loss was multiplied by."""
        ...

    def finish(self) -> dict[str, Any]:
        """After the optimiser's step."""
        ...


class Trainer:
    """Trains a model on batches, keeps the best by a dev metric, and can be stopped and resumed at any step.

    Args:
        model: trained in place.
        config: how.
        loss: ``(model, batch, moment) -> (sum of losses, number of terms)``; the step minimises their ratio. What its
            ``logged(moment)`` gives, if it has that, joins the ``epoch`` event. Of a model that teaches itself (EM) it
            is what the step found, without a gradient; then nothing more is done.
        evaluate: ``model -> {metric: value}`` on the dev data; must not draw from torch's global generator.
        directory: where ``model.safetensors`` (best) and ``last.safetensors`` (to resume) go.
        meta: JSON metadata that makes ``model.safetensors`` self-contained.
        listener: called with event dictionaries: ``step``, ``epoch``, ``end``, ``interrupted``, ``gradients``.
        watch: looks at every so many steps; each look is a ``gradients`` event.

    The ``epoch`` event says how long the epoch took (``train_seconds``) and how much of that was spent waiting for
    batches (``data_seconds``).

    Same seed and machine give the same weights; a resumed run ends with the same bits as an uninterrupted one on the
    CPU, because the checkpoint holds weights, optimiser, average, random state and the place in the epoch.

    >>> class Lines:  # y = 2 x, one batch an epoch
    ...     def __len__(self):
    ...         return 1
    ...
    ...     def iterate(self, n, start=0):
    ...         yield from [torch.tensor([[1.0, 2.0], [3.0, 6.0]])][start:]
    >>> import tempfile
    >>> trainer = Trainer(
    ...     nn.Linear(1, 1),
    ...     TrainerConfig(epochs=2, device="cpu"),
    ...     loss=lambda model, batch, moment: ((model(batch[:, :1]) - batch[:, 1:]).square().sum(), len(batch)),
    ...     evaluate=lambda model: {"loss": 0.0},
    ...     directory=Path(tempfile.mkdtemp()),
    ...     meta={},
    ... )
    >>> trainer.fit(Lines()).finished
    'epochs'
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig,
        *,
        loss: Callable[[nn.Module, Any, Moment], tuple[Tensor, int]],
        evaluate: Callable[[nn.Module], dict[str, float]],
        directory: Path,
        meta: dict[str, Any],
        listener: Listener | None = None,
        watch: Watch | None = None,
    ):
        from lightning_fabric import Fabric

        self.config, self.loss, self.evaluate = config, loss, evaluate
        self.directory, self.meta = directory, meta
        self.listener: Listener = listener or (lambda event: None)
        self.watch = watch
        accelerator = resolve_device(config.device)
        self.fabric = Fabric(accelerator=accelerator, devices=1, precision=config.precision)
        # Loss scaling must unscale before clipping, which a fused step would do itself.
        optimiser = config.optimiser_of(model, fused=config.precision != "16-mixed")
        self.raw = model
        self.model, self.optimiser = self.fabric.setup(model, optimiser)
        self.progress = Progress()
        self.last: Checkpoint | None = None
        self.average: dict[str, Tensor] = {}
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if config.average:
            followed = {name: value.detach() for name, value in model.state_dict().items()}
            self.average = {name: value.clone() for name, value in followed.items()}
            moving = [name for name, value in followed.items() if value.is_floating_point()]
            self._averaged = [self.average[name] for name in moving]
            self._followed = [followed[name] for name in moving]
        self._moment = Moment(0, 0, 0.0)
        self._taught = True  # by gradients
        self._stop = threading.Event()
        # On CUDA a loss is only looked at now and then: each look would make the device wait for the next step.
        self._lazy = self.fabric.device.type == "cuda" and config.precision != "16-mixed"
        self._unseen: tuple[Tensor, Tensor] | None = None
        self._saved = time.monotonic()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.fabric.device

    def fit(self, batches: Batched[Any], *, resume: bool = False) -> Progress:
        """Train to the end, to early stopping, or to Ctrl-C (``progress.finished`` is then empty).

        ``resume`` goes on from ``last.safetensors``, or from the :class:`Checkpoint` ``self.last`` where it was read.
        """
        self.config = self.config.planned(len(batches))
        if self.config.accumulate > 1:
            batches = Accumulated(batches, self.config.accumulate)
        if resume:
            self._restore()
        plateau = Plateau(factor=self.config.plateau_factor, patience=self.config.plateau_patience)
        plateau.current, plateau.waited = float(self.progress.plateau[0]), int(self.progress.plateau[1])
        with interruptible(self._stop), _threads(self.config.threads):
            while not self.progress.finished:
                if not self._run_epoch(batches, plateau):
                    self._save_last()
                    break
                self._close_epoch(plateau)
                if self._stop.is_set() and not self.progress.finished:
                    break
        self._announce_end()
        return self.progress

    def _run_epoch(self, batches: Batched[Any], plateau: Plateau) -> bool:
        """The rest of the current epoch; False when asked to stop in its middle."""
        progress, count = self.progress, len(batches)
        self.model.train()
        began, before = time.perf_counter(), progress.epoch_seconds
        waiting = began
        for batch in batches.iterate(progress.epoch, progress.batch):
            batch = batch.to(self.device)
            progress.data_seconds += time.perf_counter() - waiting
            self._step(batch, plateau.current, total=count * self.config.epochs)
            progress.batch += 1
            progress.step += 1
            progress.epoch_seconds = before + time.perf_counter() - began
            self.listener({"event": "step", "epoch": progress.epoch + 1, "batch": progress.batch, "batches": count})
            if self._stop.is_set() and progress.batch < count:
                return False
            if progress.step % self.config.checkpoint_every == 0 and progress.batch < count:
                self._save_last()
            waiting = time.perf_counter()
        self._look()
        progress.epoch_seconds = before + time.perf_counter() - began
        return True

    def _step(self, batch: Any, plateau: float, *, total: int) -> None:
        config, progress = self.config, self.progress
        factor = plateau * learning_rate_factor(config.schedule, progress.step, warmup=config.warmup, total=total)
        for group in self.optimiser.param_groups:
            group["lr"] = config.learning_rate * factor * group.get("scale", 1.0)
        self._moment = Moment(progress.epoch, progress.step, progress.step / max(1, total - 1))
        watch = self.watch if self.watch is not None and progress.step % self.watch.every == 0 else None
        if watch is not None:
            watch.begin(self.raw)
        summed, terms = self._gradients(batch)
        if not self._taught:
            self._count(summed, None, terms)
            return
        if watch is not None:
            watch.gradients(self._scale())
        norm = self._clip(config.clip) if config.clip else None
        self._count(summed, norm, terms)
        self.optimiser.step()
        if watch is not None:
            value = float(summed) / terms
            event = {"event": "gradients", "epoch": progress.epoch + 1, "step": progress.step, "loss": value}
            self.listener(event | watch.finish())
        if self.average:
            self._update_average()

    def _gradients(self, batch: Any) -> tuple[Tensor, int]:
        """The sum of losses and the number of terms of a step; gradients of their ratio, where there are any."""
        first, *others = batch if isinstance(batch, Parts) else (batch,)
        summed, terms = self.loss(self.model, first, self._moment)
        self._taught = summed.requires_grad
        if not self._taught:
            return summed, terms
        self.optimiser.zero_grad(set_to_none=True)
        self.fabric.backward(summed / terms)
        summed, scale = summed.detach(), terms
        for part in others:  # one graph at a time: that is what it saves memory by
            more, count = self.loss(self.model, part, self._moment)
            self.fabric.backward(more / scale)
            summed, terms = summed + more.detach(), terms + count
        if others:
            for p in self._parameters:
                if p.grad is not None:
                    p.grad.mul_(scale / terms)
        return summed, terms

    def _count(self, summed: Tensor, norm: Tensor | None, terms: int) -> None:
        """Add a step's loss and gradient norm to those of the epoch."""
        self.progress.loss_count += terms
        self.progress.norm_count += norm is not None
        nothing = torch.zeros((), dtype=torch.float64, device=summed.device) if self._lazy else None
        if nothing is None:
            self._add(float(summed), 0.0 if norm is None else float(norm))
            return
        loss, length = self._unseen or (nothing, nothing)
        self._unseen = loss + summed, length if norm is None else length + norm
        if (self.progress.step + 1) % LOOK_EVERY == 0:
            self._look()

    def _look(self) -> None:
        """Take in what the accelerator has counted since the last look."""
        if self._unseen is not None:
            loss, norm = torch.stack(self._unseen).tolist()
            self._unseen = None
            self._add(loss, norm)

    def _add(self, loss: float, norm: float) -> None:
        if not math.isfinite(loss):
            rate, step = self.optimiser.param_groups[0]["lr"], self.progress.step + 1
            raise ThalwegError(
                f"the loss became {loss} at step {step}; expected a finite number: lower "
                f"`learning_rate` (now {rate:g}) or `clip` (now {self.config.clip:g}), then resume"
            )
        self.progress.loss_sum += loss
        self.progress.norm_sum += norm

    def _scale(self) -> float:
        """What half precision has multiplied the loss by."""
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _clip(self, limit: float) -> Tensor | None:
        """Scale the whole gradient down to norm ``limit``; returns the norm it had."""
        if self.config.precision == "32-true":
            return nn.utils.clip_grad_norm_(self._parameters, limit, foreach=True)
        return self.fabric.clip_gradients(self.model, self.optimiser, max_norm=limit, error_if_nonfinite=False)

    def _update_average(self) -> None:
        # A short memory at first, so that the random start is forgotten quickly.
        decay = min(self.config.average, (1 + self.progress.step) / (10 + self.progress.step))
        torch._foreach_lerp_(self._averaged, self._followed, 1 - decay)  # type: ignore[attr-defined]

    def _close_epoch(self, plateau: Plateau) -> None:
        """Evaluate, keep the best, log, checkpoint, decide whether to go on."""
        progress = self.progress
        began = time.perf_counter()
        if not (self.directory / LAST).exists():
            self._save_last()  # a model is never there without what its training goes on from
        self.raw.eval()
        due = (progress.epoch + 1) % self.config.evaluate_every == 0 or progress.epoch + 1 >= self.config.epochs
        metrics, best = {}, False
        if due:
            with self._averaged_weights(), torch.no_grad():
                metrics = self.evaluate(self.raw)
                best = self._keep_if_best(metrics)
            progress.waited = 0 if best else progress.waited + self.config.evaluate_every
        progress.epoch += 1
        if self.config.schedule == "plateau" and due:
            plateau.update(best, self.config.evaluate_every)
            progress.plateau = [plateau.current, plateau.waited]
        progress.seconds += progress.epoch_seconds + time.perf_counter() - began
        # Logged before it is saved: a kill in between repeats the epoch, and resuming drops what was logged too early.
        self.listener(self._epoch_event(metrics, best))
        progress.batch, progress.norm_count = 0, 0
        progress.epoch_seconds = progress.data_seconds = 0.0
        progress.loss_sum = progress.loss_count = progress.norm_sum = 0.0
        progress.finished = self._reason_to_end()
        recent = time.monotonic() - self._saved < self.config.checkpoint_seconds
        if progress.finished or self._stop.is_set() or not recent:
            self._save_last()

    def _keep_if_best(self, metrics: dict[str, float]) -> bool:
        """Write the model as it stands where its dev metric beats all before."""
        config, progress = self.config, self.progress
        if config.metric not in metrics:
            raise ConfigError(f"metric `{config.metric}` is not among the dev metrics: {', '.join(metrics)}")
        value, loss = metrics[config.metric], metrics.get("loss")
        if not progress.better(value, higher=metric_direction(config.metric), loss=loss):
            return False
        meta = {**self.meta, "epoch": progress.epoch + 1, "metrics": metrics}
        save_checkpoint(self.directory / MODEL, Checkpoint(dict(self.raw.state_dict()), meta))
        progress.best_value, progress.best_loss = value, loss
        progress.best_epoch, progress.best_metrics = progress.epoch + 1, metrics
        return True

    def _epoch_event(self, metrics: dict[str, float], best: bool) -> dict[str, Any]:
        progress = self.progress
        return {
            "event": "epoch",
            "epoch": progress.epoch,
            "step": progress.step,
            "loss": progress.loss_sum / max(1.0, progress.loss_count),
            **({"learning_rate": self.optimiser.param_groups[0]["lr"]} if self._taught else {}),
            **getattr(self.loss, "logged", lambda _: {})(self._moment),
            **({"gradient_norm": progress.norm_sum / progress.norm_count} if progress.norm_count else {}),
            "seconds": progress.seconds,
            "train_seconds": progress.epoch_seconds,
            "data_seconds": progress.data_seconds,
            "memory": peak_memory(self.device),
            "dev": metrics,
            "best": best,
        }

    def _reason_to_end(self) -> str:
        if self.progress.epoch >= self.config.epochs:
            return "epochs"
        return "patience" if self.config.patience and self.progress.waited >= self.config.patience else ""

    def _announce_end(self) -> None:
        progress = self.progress
        if not progress.finished:
            self.listener({"event": "interrupted", "epoch": progress.epoch, "step": progress.step})
            return
        self.listener(
            {
                "event": "end",
                "reason": progress.finished,
                "best_epoch": progress.best_epoch,
                "best": progress.best_metrics,
                "seconds": progress.seconds,
            }
        )

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """The averaged weights stand in for the current ones inside the block."""
        if not self.average:
            yield
            return
        current = {name: value.detach().clone() for name, value in self.raw.state_dict().items()}
        # Whole numbers (counters) are not averaged: they stand as they are.
        self.average |= {name: value for name, value in current.items() if not value.is_floating_point()}
        self.raw.load_state_dict(self.average)
        try:
            yield
        finally:
            self.raw.load_state_dict(current)

    def _save_last(self) -> None:
        self._look()
        tensors = {f"model.{name}": value for name, value in self.raw.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        tensors |= flatten_optimiser(self.optimiser, "optimiser.")
        tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        meta = {**self.meta, "progress": vars(self.progress)}
        save_checkpoint(self.directory / LAST, Checkpoint(tensors, meta))
        self._saved = time.monotonic()

    def _restore(self) -> None:
        path = self.directory / LAST
        checkpoint, self.last = self.last or load_checkpoint(path), None
        with making_sense(path, "does not fit this config", "resume with the config it was trained with"):
            self.progress = Progress.from_json(checkpoint.meta["progress"])
            # A finished run goes on when it is given more epochs or patience.
            self.progress.finished = self._reason_to_end()
            self.raw.load_state_dict(checkpoint.part("model."))
            if self.average:
                for name, value in checkpoint.part("average.").items():
                    self.average[name].copy_(value)
            restore_optimiser(self.optimiser, checkpoint.part("optimiser."))
            torch.set_rng_state(checkpoint.tensors["random.cpu"])
            if self.device.type == "cuda" and "random.cuda" in checkpoint.tensors:
                torch.cuda.set_rng_state(checkpoint.tensors["random.cuda"], self.device)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_memory(device: torch.device) -> int:
    """Most bytes that tensors on an accelerator, or this process on the CPU, have held so far; 0 where none can tell.

    >>> peak_memory(torch.device("cpu")) >= 0
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resolve_device(name: str) -> str:
    """``auto`` becomes the accelerator that is there; one that is not gives a clear error.

    >>> resolve_device("cpu")
    'cpu'
    """
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return "cuda" if present["cuda"] else "cpu"
    if not present.get(name, False):
        raise ConfigError(f"device `{name}` was asked for but torch finds none here; use `device=auto` or `device=cpu`")
    return name
