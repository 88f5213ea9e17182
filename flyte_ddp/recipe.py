"""What a user provides: data, a network and measures; optionally augmentation, an optimizer, a schedule and more.

A workflow file names a recipe, "package.module:Name"; only the ranks load it, since it imports torch.
docs/your-own-model.md goes from an empty folder to a model, dataset and loss of your own.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp import random_numbers
from flyte_ddp.batch_share import BatchShare, gather_rows
from flyte_ddp.errors import InputError
from flyte_ddp.model_files.model_metadata import needs_metadata
from flyte_ddp.model_files.weights import REMEDY, load_weights

CPU = torch.device("cpu")
# A tensor, or a tuple, list or dict of Trees; the first dimension of each tensor is the samples
Tree = Any
# By name, for each sample: values (n,), or values (n,) and weights (n,)
Measures = dict[str, Tensor | tuple[Tensor, Tensor]]


class Random:
    """Random numbers for a step: a sample's depend on its position in the global batch, not on who draws them.

    Attributes:
        epoch: of the step, from 0, for what alternates or changes gradually.
    """

    def __init__(self, seed: int, share: BatchShare, device: torch.device = CPU, epoch: int = 0):
        self.epoch = epoch
        self._seed = seed
        self._share = share
        self._device = device
        self._calls = 0

    def uniform(self, *shape: int) -> Tensor:
        """(n, *shape) float32, from 0 to below 1."""
        return self._drawn(random_numbers.uniform, shape)

    def normal(self, *shape: int) -> Tensor:
        """(n, *shape) float32, of mean 0 and standard deviation 1."""
        return self._drawn(random_numbers.normal, shape)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """(n, *shape) int64, from low to high - 1."""
        return self._drawn(partial(random_numbers.integers, low=low, high=high), shape)

    def _drawn(self, numbers: Callable[..., Tensor], shape: Sequence[int]) -> Tensor:
        self._calls += 1
        key = random_numbers.key_of(random_numbers.Use.CALL, self._seed, self._calls)
        each = math.prod(shape)
        share = self._share
        return numbers(key, share.first * each, share.count * each, self._device).view(share.count, *shape)


def _undefined(recipe: "Recipe", method: str) -> InputError:
    return InputError(f"{type(recipe).__name__} must define {method}: is it misspelt?")


class Recipe:
    """The parts of a training. A subclass must define data, model and measure; the rest has defaults.

    Each method sees this rank's n samples of a global batch, at least one, or n samples of one of its parts with
    virtual ranks.

    Attributes:
        settings: the dataclass that the workflow was given. The code of its class counts for the cache if the recipe's
            module imports it, even just as a type.
        data_path: the file or folder that the task was given; None without one. Of data that stay in a storage, their
            URL.
        device: where batches, and the recipe's own tensors, belong.
        samples: what to call the samples, in the plural.
        headline: the name of the main measure; empty is the first one besides the loss.
        percent: the measures from 0 to 1 that are shown in per cent.
        lower_is_better, higher_is_better: measures other than the loss (lower is better) and those in percent (higher
            is better), for choosing an epoch, or promoting a model, by one of them.
        has_validation: whether data("validation") returns samples to choose the best epoch by.
        clip_norm: gradient clipping by Euclidean norm over all weights; 0 is off.
        micro_batch: how many of a rank's samples are computed at a time, to save memory (gradient accumulation); 0 is
            all, -1 as many as fit, which is all of them, halved until a step fits.
        activation_checkpointing: patterns (fnmatch) of the names of layers that are computed again for the backward
            pass instead of kept for it; saves memory, with the same bits.
        fsdp_units: patterns like these of the layers that options.sharding makes whole one after the other; the blocks
            of a transformer, for example.
        ema_decay: decay per step of the exponential moving average of the weights, which is evaluated and returned; at
            step n it is at most (1 + n) / (10 + n), so that a short training is averaged over its end; 0 is off.
        passes_per_epoch: how often an epoch goes over the training samples.
        train_fraction: share of the training samples that each epoch uses, different ones in each epoch.
        length_window: batches among which samples are sorted by length, so that those of a batch are alike and need
            little padding; 0 is off.
    """

    device = CPU
    samples = "samples"
    headline = ""
    percent: tuple[str, ...] = ("accuracy",)
    lower_is_better: tuple[str, ...] = ()
    higher_is_better: tuple[str, ...] = ()
    has_validation = False
    clip_norm = 0.0
    micro_batch = 0
    activation_checkpointing: tuple[str, ...] = ()
    fsdp_units: tuple[str, ...] = ()
    ema_decay = 0.0
    passes_per_epoch = 1
    train_fraction = 1.0
    length_window = 0
    has_read_init = False
    _init_path: Path | None = None

    def __init__(self, settings: Any, data_path: Any = None):
        self.settings = settings
        self.data_path = data_path
        self.share = BatchShare()

    def __deepcopy__(self, memo: Any) -> "Recipe":
        """Itself: a layer that has been given all_gather() needs it in copies of the network, too."""
        return self

    @property
    def init_path(self) -> Path:
        """The folder that the task was given as init, for from_pretrained in model(); InputError without one. It is
        not known yet in __init__.
        """
        if self._init_path is None:
            raise InputError(f"{type(self).__name__} starts from given weights: give the folder that has them as init")
        self.has_read_init = True
        return self._init_path

    @init_path.setter
    def init_path(self, folder: Path | None) -> None:
        self._init_path = folder
        self.has_read_init = False

    @classmethod
    def load_model(
        cls,
        path: str | Path,
        settings: Any = None,
        data_path: Path | None = None,
        init_path: Path | None = None,
    ) -> nn.Module:
        """The trained network from a model_state or safetensors file, in evaluation mode on the CPU; nothing in the
        file is executed, but the module of the settings' class, which it names, is imported.

        settings: those of the training; by default those in the file's metadata.
        data_path, init_path: those of the training, where model() needs them.
        """
        if settings is None:
            settings = needs_metadata(path, "give the settings of the training").load_settings(path)
        recipe = cls(settings, data_path)
        recipe.init_path = init_path
        return recipe.trained_model(path)

    def trained_model(self, path: str | Path, called: str = "model_state", remedy: str = REMEDY) -> nn.Module:
        """model() with the weights of a file, in evaluation mode on the CPU. called, remedy: see load_weights."""
        return load_weights(self.initial_model(), path, called, remedy).eval()

    def initial_model(self) -> nn.Module:
        """model() with the random numbers of a training: what it draws and freezes is in no file."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.settings.seed)
            return self.model()

    def data(self, split: str) -> Any:
        """The samples of "train" or "test", and of "validation" if has_validation is set.

        Tensors and arrays, single or in tuples, lists and dicts, are kept on the device; memory maps (numpy.memmap)
        stay on disk and are read batch by batch; a torch.utils.data.Dataset with a length is read sample by sample, by
        options.loader_workers processes per rank; Blocks are fetched from a storage as they are needed.
        """
        raise _undefined(self, "data(split)")

    def lengths(self, split: str) -> Any:
        """(N,) whole numbers, for samples of different lengths; None where all have the same shape.

        Tensors whose samples have this length in their first dimension are padded with zeros, those that come padded
        are cut, to the longest of the global batch, so that what augment() draws is the same on any number of ranks.
        """
        return None

    def model(self) -> nn.Module:
        """The network, its weights drawn from torch's random numbers, seeded by settings.seed; it returns no softmax.

        As with DistributedDataParallel, each rank has its own dropout, batch norm sees the rank's own samples, and
        buffers are rank 0's.
        """
        raise _undefined(self, "model()")

    def measure(self, outputs: Any, batch: Tree) -> Measures:
        """The measures of each sample, including "loss", which is minimized, unless there is an "objective".

        Each is reported as the sum of its values over the sum of its weights (1 by default), over the whole split; what
        is minimized is the same ratio over the global batch, by its values: its weights must not need a gradient.
        """
        raise _undefined(self, "measure(outputs, batch)")

    def forward(self, model: nn.Module, batch: Tree) -> Any:
        """The network's outputs for a batch: a Tree."""
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def facts(self) -> dict[str, Any]:
        """What the metadata and the model card should say of the network besides its settings; values that fit JSON.

        "classes", a list of names, names a classifier's measures by class.
        """
        return {}

    def augment(self, batch: Tree, random: Random) -> Tree:
        """A training batch, changed at random."""
        return batch

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Any optimizer of torch.optim whose step needs no closure and takes dense gradients: all but LBFGS and
        SparseAdam. The engine normalises, clips and checks the gradients, and restores the optimizer on resume.
        """
        return torch.optim.AdamW(model.parameters(), getattr(self.settings, "learning_rate", 1e-3), fused=True)

    def lr_lambda(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by at this step of `steps`; see flyte_ddp.schedules."""
        return 1.0

    def derive(self, measures: dict[str, float]) -> dict[str, float]:
        """The measures to report: add here what is computed from others, such as a perplexity."""
        return measures

    def constant_loss(self) -> float:
        """The mean loss, on the split that epochs are evaluated on, of the best constant prediction; 0 if unknown.

        A training that is no better gets a warning. If it is unknown, the loss of outputs paired with other samples
        stands in for it.
        """
        return 0.0

    def predictions(self, outputs: Any, batch: Tree) -> Tensor | None:
        """(n, ...) what to save for each test sample in predictions.npy, in a type of NumPy's; None saves nothing."""
        return None

    def pictures(self, outputs: Any, batch: Tree) -> Sequence[tuple[str, Tensor]]:
        """(caption, image (C, H, W) from 0 to 1, C being 1 or 3) of some test samples, for the report."""
        return ()

    def all_gather(self, local: Tensor) -> Tensor:
        """(N, ...) of the whole global batch, with gradients, from this rank's (n, ...); all ranks must call it.

        For losses that compare samples with one another. self.share.first is the position of the rank's first sample.
        With virtual ranks it must be called once, in measure().
        """
        share = self.share
        if not local.ndim or len(local) != share.count:
            raise InputError(
                f"all_gather() must be given a row for each of the {share.count} samples, got shape "
                f"{tuple(local.shape)}: repeat what all samples share by expand()"
            )
        if self.settings.virtual_ranks and not (share.stand_in or share.alone):
            raise InputError(
                "with virtual_ranks all_gather() must be called from the first step on, and in each, or it would see "
                "the samples of one part alone: call it always, or set virtual_ranks to 0"
            )
        return gather_rows(local, share)
