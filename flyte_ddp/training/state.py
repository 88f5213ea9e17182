"""All that changes while training: weights, optimizer, schedule, average, position and metrics so far."""

from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Tuple

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, swa_utils
from torch.optim.lr_scheduler import LambdaLR

from flyte_ddp.training.batches import Batch
from flyte_ddp.training.events import EpochFinished
from flyte_ddp.training.layers import Dropout
from flyte_ddp.training.watch import Watch


class Step(nn.Module):
    """Forward pass, loss and metrics of one rank's share of a batch, in a form that DDP reduces in one go.

    DDP averages gradients over the ranks. Each rank's loss is therefore weighted by its share, so that the average is
    the gradient of the mean over the global batch, however uneven the shares. The metrics take the same way, as the
    gradient of a parameter that is never trained: that spares a second all-reduce, and all ranks learn the same things
    at the same step.
    """

    def __init__(self, model: nn.Module, world_size: int, autocast: bool, label_smoothing: float):
        super().__init__()
        self.model, self.world_size, self.autocast = model, world_size, autocast
        self.label_smoothing = label_smoothing
        self.dropouts = [layer for layer in model.modules() if isinstance(layer, Dropout)]
        self.sums = nn.Parameter(torch.zeros(3))  # loss, correct, requests to stop

    def forward(self, batch: Batch, stop: bool) -> Tensor:
        for layer in self.dropouts:
            layer.first, layer.size = batch.first, batch.size
        with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=self.autocast):
            scores = self.model(batch.images)
        loss = F.nll_loss(scores, batch.labels, reduction="sum")
        with torch.no_grad():
            sums = torch.zeros_like(self.sums)
            sums[0] = loss  # without smoothing, so that it can be compared with the loss on the test split
            sums[1] = (scores.argmax(1) == batch.labels).sum()
            sums[2] = float(stop)
        if self.label_smoothing:
            loss = torch.lerp(loss, -scores.mean(1).sum(), self.label_smoothing)
        return self.world_size * (loss / batch.size + self.sums @ sums)


@dataclass(frozen=True)
class Sums:
    """Metrics of the epoch so far, all ranks together; steps counts those before any that was not finite."""

    loss: float
    correct: int
    steps: int
    stop: bool


class TrainingState:
    """What a checkpoint holds and a resume restores, and how one step changes it."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        world_size: int,
        *,
        autocast: bool,
        label_smoothing: float,
        learning_rate: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        clip_norm: float,
        schedule: str,
        warmup_fraction: float,
        total_steps: int,
        ema_decay: float,
        constant_loss: float,
    ):
        self.device = device
        if device.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.ddp = DistributedDataParallel(
            Step(self.model, world_size, autocast, label_smoothing).to(device),
            gradient_as_bucket_view=True,
        )
        # They are the same on all ranks, see layers.py (not as an argument, whose name depends on torch's version)
        self.ddp.broadcast_buffers = False
        self.optimizer = SGD(
            self.model.parameters(), learning_rate, momentum, nesterov=nesterov and momentum > 0,
            weight_decay=weight_decay, fused=True,
        )  # fmt: skip
        warmup_steps = warmup_fraction * total_steps
        factors = {
            "constant": lambda step: 1.0,
            "onecycle": lambda step: float(np.interp(step, (0, warmup_steps, total_steps), (0.1, 1, 0.001))),
        }
        self.schedule = LambdaLR(self.optimizer, factors[schedule])
        self.average = (
            swa_utils.AveragedModel(
                self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(ema_decay), use_buffers=True
            )
            if ema_decay
            else None
        )
        # A loss or gradient that is not finite raises this flag for good; the fused optimizer then leaves the weights
        # as they are, without the host having to look (the means by which torch.amp.GradScaler skips a step)
        self.optimizer.found_inf = self.flag = torch.zeros((), device=device)  # type: ignore[attr-defined]
        self.epoch = self.step = 0
        self.epoch_seconds = 0.0
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)  # Step's sums, then good steps
        self._clip_norm, self._norms = clip_norm, torch.zeros(0, device=device)
        self.history: List[EpochFinished] = []
        self.watch = Watch(constant_loss)

    @property
    def evaluated(self) -> nn.Module:
        """The network that is evaluated and returned: the average where there is one."""
        return self.average.module if self.average else self.model

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def train_step(self, batch: Batch, stop: bool) -> None:
        """One optimizer update from this rank's share of a global batch; a collective."""
        self.ddp.zero_grad()  # here rather than at the end, so that the gradients can be looked at until the next step
        self.ddp(batch, stop).backward()
        self._sums[:-1] += self.ddp.module.sums.grad
        gradients = self._gradients()[1]
        self._norms = torch.stack(torch._foreach_norm(gradients))
        norm = torch.linalg.vector_norm(self._norms)
        self.flag.logical_or_(~torch.isfinite(norm + self._sums[0]))
        self._sums[-1] += 1 - self.flag
        if self._clip_norm:
            torch._foreach_mul_(gradients, (self._clip_norm / norm).clamp(max=1))
        self.optimizer.step()
        self.schedule.step()
        if self.average:
            self.average.update_parameters(self.model)
        self.step += 1

    def find_non_finite(self, batch: Batch) -> Tuple[str, List[int]]:
        """Does a bad step again, to say what is not finite, loss or gradient, and on which ranks; a collective.

        A step itself does not know: its gradients are those of all ranks together.
        """
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        loss = self.ddp.module(batch, False)
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        norms = torch.stack(torch._foreach_norm([gradient for gradient in gradients if gradient is not None]))
        bad = [not bool(value.isfinite().all()) for value in (loss, norms)]
        everyone: List[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, bad)
        for what, flags in zip(("loss", "gradient"), zip(*everyone, strict=True), strict=True):
            ranks = [rank for rank, flag in enumerate(flags) if flag]
            if ranks:
                return what, ranks
        return "gradient", list(range(len(everyone)))  # finite on each rank, but not their sum

    def gradient_norms(self) -> Dict[str, float]:
        """Euclidean norm of each parameter's gradient of the last step, before clipping; the host waits for it."""
        return dict(zip(self._gradients()[0], self._norms.tolist(), strict=True))

    def gradient_histograms(self, bins: int = 64) -> Dict[str, Tuple[List[float], List[float]]]:
        """For each parameter's gradient of the last step, after clipping: counts of equal bins, and the bins' edges."""
        names, gradients = self._gradients()
        histograms = (np.histogram(gradient.float().cpu().numpy(), bins) for gradient in gradients)
        return {
            name: (counts.tolist(), edges.tolist()) for name, (counts, edges) in zip(names, histograms, strict=True)
        }

    def _gradients(self) -> Tuple[List[str], List[Tensor]]:
        found = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        return [name for name, _ in found], [gradient for _, gradient in found]

    def sums(self) -> Sums:
        """Metrics of the epoch so far; makes the host wait for the device."""
        loss, correct, stop, steps = self._sums.tolist()
        return Sums(loss, round(correct), round(steps), stop > 0)

    def finish_epoch(self, finished: EpochFinished) -> None:
        self.history.append(finished)
        self._sums.zero_()
        self.epoch, self.step, self.epoch_seconds = self.epoch + 1, 0, 0.0

    def state_dict(self) -> Dict[str, Any]:
        """Copies of everything that a resume needs, on the CPU: the training may go on while they are written."""
        return {
            "model": _cpu_copy(self.model.state_dict()),
            "average": _cpu_copy(self.average.state_dict()) if self.average else None,
            "optimizer": _cpu_copy(self.optimizer.state_dict()),
            "schedule": self.schedule.state_dict(),
            "sums": self._sums.cpu().clone(),
            "epoch": self.epoch,
            "step": self.step,
            "epoch_seconds": self.epoch_seconds,
            "history": [asdict(finished) for finished in self.history],
            "watch": self.watch.state_dict(),
        }

    def load_state_dict(self, saved: Dict[str, Any]) -> None:
        """Restores what state_dict gave, whatever the number of ranks was then."""
        self.model.load_state_dict(saved["model"])
        if self.average:
            self.average.load_state_dict(saved["average"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        # requests to stop belong to the run that was stopped
        self._sums[:2], self._sums[-1] = saved["sums"][:2], saved["sums"][-1]
        self.epoch, self.step, self.epoch_seconds = saved["epoch"], saved["step"], saved["epoch_seconds"]
        self.history = [EpochFinished(**finished) for finished in saved["history"]]
        self.watch.load_state_dict(saved["watch"])


def _cpu_copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _cpu_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cpu_copy(item) for item in value]
    return value
