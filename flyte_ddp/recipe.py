"""The base class of recipes.

A recipe provides data, a network and measures; optimizer, augmentation and more have defaults.

A workflow file names a recipe, "package.module:Name". Only the ranks load it, since a recipe imports torch.
docs/your-own-model.md goes from an empty folder to a model, dataset and loss of your own.
"""

import math
import random as python_random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flyte_ddp import random_numbers
from flyte_ddp.batch_share import BatchShare, GatherRows
from flyte_ddp.errors import InputError
from flyte_ddp.model_files.model_metadata import read_required_metadata
from flyte_ddp.model_files.weights import REMEDY, load_weights

CPU = torch.device("cpu")
# A tensor, or a tuple, list or dict of Trees. The first dimension of each tensor counts the samples.
Tree = Any
# Measures by name, with a value for each sample: values (n,), or values (n,) and weights (n,)
Measures = dict[str, Tensor | tuple[Tensor, Tensor]]


class Random:
    """Random numbers for a step. A sample's numbers depend on its position in the global batch, not on the rank.

    Attributes:
        epoch: the epoch of the step, from 0, for what alternates or changes gradually.
    """

    def __init__(self, seed: int, share: BatchShare, device: torch.device = CPU, epoch: int = 0):
        self.epoch = epoch
        self._seed = seed
        self._share = share
        self._device = device
        self._calls = 0

    def uniform(self, *shape: int) -> Tensor:
        """Return (n, *shape) float32, from 0 to below 1."""
        return self._drawn(random_numbers.uniform, shape)

    def normal(self, *shape: int) -> Tensor:
        """Return (n, *shape) float32, of mean 0 and standard deviation 1."""
        return self._drawn(random_numbers.normal, shape)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return (n, *shape) int64, from low to high - 1."""
        return self._drawn(partial(random_numbers.integers, low=low, high=high), shape)

    def _drawn(self, numbers: Callable[..., Tensor], shape: Sequence[int]) -> Tensor:
        """Draw (n, *shape) numbers by a function of random_numbers. Each call of a step has a key of its own."""
        self._calls += 1
        key = random_numbers.derive_key(random_numbers.Use.CALL, self._seed, self._calls)
        each = math.prod(shape)
        share = self._share
        return numbers(key, share.first * each, share.count * each, self._device).view(share.count, *shape)


def _undefined(recipe: "Recipe", method: str) -> InputError:
    return InputError(f"{type(recipe).__name__} must define {method}: is it misspelt?")


class Recipe:
    """The parts of a training. A subclass must define data, model and measure; the rest has defaults.

    Each method sees this rank's n samples of a global batch, at least one. With virtual ranks it sees the n samples of
    one part.

    Attributes:
        settings: the dataclass that the workflow was given. The code of its class counts for the cache if the recipe's
            module imports the class, even just as a type.
        data_path: the file or folder that the task was given, or None. For data that stay in a storage, their URL.
        device: where batches, and the recipe's own tensors, belong.
        samples: what the samples are called, in the plural.
        headline: the name of the main measure; empty is the first one besides the loss.
        percent: the measures from 0 to 1 that are shown in per cent.
        lower_is_better, higher_is_better: measures to choose an epoch, or promote a model, by. The loss (lower is
            better) and measures in percent (higher is better) need not be named.
        has_validation: whether data("validation") returns samples to choose the best epoch by.
        clip_norm: gradient clipping by Euclidean norm over all weights; 0 is off.
        micro_batch: how many of a rank's samples are computed at a time, to save memory (gradient accumulation). 0 is
            all of them; -1 halves that number until a step fits into the memory.
        activation_checkpointing: patterns (fnmatch) of the names of layers that are computed again for the backward
            pass, which saves memory. The bits stay the same.
        fsdp_units: patterns (fnmatch) of the names of layers, such as a transformer's blocks, that options.sharding
            makes whole one after the other.
        ema_decay: decay per step of the exponential moving average of the weights, which is evaluated and returned; 0
            is off. At step n the decay is at most (1 + n) / (10 + n), so that a short training is averaged over its
            end.
        passes_per_epoch: how often an epoch goes over the training samples.
        train_fraction: share of the training samples that each epoch uses, different ones in each epoch.
        length_window: number of batches among which samples are sorted by length, so that the samples of a batch are
            alike and need little padding; 0 is off.
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
        """Return the recipe itself.

        A layer that was given all_gather() needs the same recipe in copies of the network.
        """
        return self

    @property
    def init_path(self) -> Path:
        """Return the folder that the task was given as init, for from_pretrained in model().

        The folder is not known yet in __init__. Reading this property sets has_read_init to True.

        Raises:
            InputError: the task was given no init.
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
        """Load the trained network from a model_state or safetensors file, in evaluation mode on the CPU.

        Nothing in the file is executed. But without `settings`, the method imports the module of their class, which
        the file names.

        Args:
            path: the file.
            settings: the settings of the training; by default those in the file's metadata.
            data_path: the data of the training, if model() needs them.
            init_path: the folder given to the training as init, if model() needs it.

        Raises:
            InputError: The file is missing or damaged, does not fit the network, or has no settings that can be loaded.
                Or model() needs init_path.
        """
        if settings is None:
            settings = read_required_metadata(path, "give the settings of the training").load_settings(path)
        recipe = cls(settings, data_path)
        recipe.init_path = init_path
        return recipe.trained_model(path)

    def trained_model(self, path: str | Path, called: str = "model_state", remedy: str = REMEDY) -> nn.Module:
        """Return model() with the weights of a file, in evaluation mode on the CPU.

        Args:
            path: the file.
            called: what messages call the file.
            remedy: what messages tell the user to do.

        Raises:
            InputError: the file cannot be read, or its weights do not fit the network.
        """
        return load_weights(self.initial_model(), path, called, remedy).eval()

    def initial_model(self) -> nn.Module:
        """Return a new network from model(), as at the start of a training, before any value is loaded or changed.

        model() draws by settings.seed. So weights that model() freezes, which no file has, are those of the training.
        Afterwards the method restores the global generators of Python, NumPy and torch on the CPU. The generators of
        GPUs stay seeded.
        """
        states = python_random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=()):
                return seeded_model(self)
        finally:
            python_random.setstate(states[0])
            np.random.set_state(states[1])

    def data(self, split: str) -> Any:
        """Return the samples of a split, the same on all ranks.

        Each recipe defines this method; the default raises InputError.

        Args:
            split: "train", "test", or "validation" if has_validation is set.

        Returns:
            Samples of one of these kinds.

            - Tensors and arrays, single or in tuples, lists and dicts. They are kept on the device.
            - Memory maps (numpy.memmap). They stay on disk and are read batch by batch.
            - A torch Dataset with a length. In each rank, options.loader_workers processes read its samples.
            - Blocks. They are fetched from a storage as they are needed.
        """
        raise _undefined(self, "data(split)")

    def lengths(self, split: str) -> Any:
        """Return the length of each sample of a split, (N,) whole numbers, or None if all samples have the same shape.

        The engine makes all samples of a global batch as long as its longest one, so augment() draws the same numbers
        on any number of ranks. This applies to each tensor whose samples have these lengths as first dimension:

        - Shorter samples are padded with zeros.
        - If data() returns all samples padded to the longest one of the split, they are cut. After its length, such a
          sample must have one value everywhere.
        """
        return None

    def model(self) -> nn.Module:
        """Build the network. What it draws from torch, NumPy or Python's random is drawn by settings.seed.

        The network returns no softmax. As with DistributedDataParallel, each rank has its own dropout, batch norm sees
        the rank's own samples, and buffers are rank 0's.
        """
        raise _undefined(self, "model()")

    def measure(self, outputs: Any, batch: Tree) -> Measures:
        """Return the measures of each sample, among them "loss".

        Each recipe defines this method; the default raises InputError.

        A measure is reported for the whole split: the sum of its values divided by the sum of its weights. Training
        minimizes the same quotient of "objective", or else of "loss", over the global batch.

        Args:
            outputs: what forward() returned for the batch.
            batch: the batch of this rank, n samples.

        Returns:
            By measure, its values (n,), or a pair of values (n,) and weights (n,). Weights are 1 by default, and must
            not need a gradient.
        """
        raise _undefined(self, "measure(outputs, batch)")

    def forward(self, model: nn.Module, batch: Tree) -> Any:
        """Return the network's outputs for a batch, a Tree."""
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def facts(self) -> dict[str, Any]:
        """Return what the metadata and the model card should say of the network besides its settings, as JSON values.

        "classes", a list of names, names a classifier's measures by class.
        """
        return {}

    def augment(self, batch: Tree, random: Random) -> Tree:
        """Return a training batch, changed at random."""
        return batch

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of torch.optim other than LBFGS and SparseAdam.

        The default is a fused AdamW with settings.learning_rate, or 1e-3 if the settings have no learning_rate. The
        engine normalises, clips and checks the gradients before each step, and restores the optimizer on resume.

        A hook on the optimizer sees the gradients of the step. A hook on a weight or an activation sees other
        gradients: those of the loss summed over this rank's samples, times the number of ranks.
        """
        return torch.optim.AdamW(model.parameters(), getattr(self.settings, "learning_rate", 1e-3), fused=True)

    def lr_lambda(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate at this step of `steps`; flyte_ddp.schedules has some."""
        return 1.0

    def derive(self, measures: dict[str, float]) -> dict[str, float]:
        """Return the measures to report. Add measures here that follow from others, such as a perplexity."""
        return measures

    def constant_loss(self) -> float:
        """Return the mean loss of the best constant prediction on the split that epochs are evaluated on; 0 if unknown.

        A training that is no better gets a warning. If the loss is unknown, the loss of outputs paired with other
        samples stands in for it.
        """
        return 0.0

    def predictions(self, outputs: Any, batch: Tree) -> Tensor | None:
        """Return what to save in predictions.npy, (n, ...) in a NumPy type. None saves nothing."""
        return None

    def pictures(self, outputs: Any, batch: Tree) -> Sequence[tuple[str, Tensor]]:
        """Return captions and images, (C, H, W) from 0 to 1 with C 1 or 3, of some test samples, for the report."""
        return ()

    def all_gather(self, local: Tensor) -> Tensor:
        """Gather rows of the whole global batch, with gradients, for losses that compare samples with one another.

        All ranks must call this method. With virtual ranks, measure() must call it, once in every step. In a process
        without other ranks, as for predictions, the result is `local` itself.

        Args:
            local: (n, ...), a row for each of this rank's samples.

        Returns:
            (N, ...), the rows of all ranks. This rank's first sample has row self.share.first.

        Raises:
            InputError: `local` does not have a row for each sample. Or, with virtual ranks, the first step did not call
                this method, or measure() calls it twice.
        """
        share = self.share
        if not local.ndim or len(local) != share.count:
            raise InputError(
                f"all_gather() must be given a row for each of the {share.count} samples, got shape "
                f"{tuple(local.shape)}: repeat what all samples share by expand()"
            )
        if share.stand_in:
            return share.stand_in(local)
        if share.alone:
            return local
        if self.settings.virtual_ranks:
            raise InputError(
                "with virtual_ranks all_gather() must be called from the first step on, and in each, or it would see "
                "the samples of one part alone: call it always, or set virtual_ranks to 0"
            )
        return GatherRows.apply(share.own(local), share.size)


def seeded_model(recipe: Recipe) -> nn.Module:
    """Seed the generators of torch, NumPy and Python with settings.seed, and return the recipe's model()."""
    seed: int = recipe.settings.seed
    torch.manual_seed(seed)
    np.random.seed(seed)
    python_random.seed(seed)
    return recipe.model()
