"""What a user brings: data, a network and measures; and, if they want, augmentation, an optimizer and a schedule.

The library's front door. A workflow file names a recipe, "package.module:Name"; the ranks alone load it, since it
imports torch. docs/your-own-model.md goes from an empty folder to an own model, dataset and loss.
"""

from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from flyte_ddp.model_metadata import needs_metadata
from flyte_ddp.share import Share, gather_rows
from flyte_ddp.weights import load_weights

# A tensor, or a tuple, list or dict of such, nested at will; the first dimension of each tensor is the samples
Tree = Any
# By name, for each sample: values (n,), or values (n,) and weights (n,)
Measures = Dict[str, Union[Tensor, Tuple[Tensor, Tensor]]]


class Random:
    """Random numbers for a step, drawn for the whole global batch; a rank gets the rows of its own n samples."""

    def __init__(self, generator: torch.Generator, share: Share):
        self._generator, self._share = generator, share

    def uniform(self, *shape: int) -> Tensor:
        """(n, *shape) float32, from 0 to below 1."""
        return self._mine(torch.rand(self._share.size, *shape, **self._by))

    def normal(self, *shape: int) -> Tensor:
        """(n, *shape) float32, of mean 0 and standard deviation 1."""
        return self._mine(torch.randn(self._share.size, *shape, **self._by))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """(n, *shape) int64, from low to high - 1."""
        return self._mine(torch.randint(low, high, (self._share.size, *shape), **self._by))

    @property
    def _by(self) -> Dict[str, Any]:
        return {"generator": self._generator, "device": self._generator.device}

    def _mine(self, everyones: Tensor) -> Tensor:
        return everyones[self._share.first : self._share.first + self._share.count]


class Recipe:
    """A training by its parts. A subclass has to give data, model and measure; the rest has defaults.

    Each method sees this rank's n samples of a global batch, n being 0 on some ranks in a short last batch. What it
    returns must not depend on how many ranks share the batch: a look at the start of each training finds out.

    Attributes:
        settings: the dataclass that the workflow was given. A recipe that imports its class, if only as a type, has the
            cache follow the code of it.
        data_path: the file or folder that the task was given; None without one.
        device: where the batches, and tensors of the recipe's own, belong.
        samples: what one calls the samples, in the plural.
        headline: the measure that a run is judged by; empty is the first beside the loss.
        shares: the measures that are shares from 0 to 1, to be shown in per cent.
        lower_is_better, higher_is_better: the measures of which the least, or the most, is the best, where an epoch is
            chosen, or a model promoted, by one; of the loss it is the least, of shares the most.
        has_validation: that data("validation") gives samples to choose the best epoch by.
        clip_norm: to which the gradient is shortened where its Euclidean norm, over all weights, is larger; 0 is off.
        micro_batch: samples of a rank that are computed at a time, to save memory: the result is the same; 0 is all.
        ema_decay: per step, of the exponential moving average of the weights that is evaluated and returned; 0 is off.
        passes_per_epoch: how often an epoch goes over the training samples.
        train_fraction: share of these that an epoch takes, each epoch others.
        couples_samples: that the loss of a sample depends on the others of its batch, by way of everyone().
        may_depend_on_ranks: lets a training pass whose result depends on the number of ranks; its outputs then say so.
    """

    device = torch.device("cpu")
    samples = "samples"
    headline = ""
    shares: Tuple[str, ...] = ("accuracy",)
    lower_is_better: Tuple[str, ...] = ()
    higher_is_better: Tuple[str, ...] = ()
    has_validation = False
    clip_norm = 0.0
    micro_batch = 0
    ema_decay = 0.0
    passes_per_epoch = 1
    train_fraction = 1.0
    couples_samples = False
    may_depend_on_ranks = False

    def __init__(self, settings: Any, data_path: Optional[Path] = None):
        self.settings, self.data_path = settings, data_path
        self.share = Share()

    @classmethod
    def load_model(cls, path: Union[str, Path], settings: Any = None, data_path: Optional[Path] = None) -> nn.Module:
        """The trained network from a model_state or safetensors file, in evaluation mode on the CPU; nothing in the
        file is executed.

        settings: that the network was trained with; without them, those that the file's metadata name.
        data_path: that it was trained with, where model() needs it.
        """
        if settings is None:
            settings = needs_metadata(path, "give the settings of the training").load_settings()
        return load_weights(cls(settings, data_path).model(), path).eval()

    def data(self, split: str) -> Any:
        """The samples of "train" or "test", and where has_validation says so of "validation".

        Tensors and arrays, as one or in tuples, lists and dicts, are kept on the device; memory maps (numpy.memmap)
        stay on disk and are read batch by batch; a torch.utils.data.Dataset with a length is read sample by sample, by
        options.loader_workers processes of each rank.
        """
        raise NotImplementedError

    def model(self) -> nn.Module:
        """The network, with weights from torch's random numbers, which settings.seed decides; it returns no softmax.

        Plain Dropout and BatchNorm layers, and MultiheadAttention, will see the whole global batch.
        """
        raise NotImplementedError

    def measure(self, outputs: Any, batch: Tree) -> Measures:
        """The measures of each sample, with "loss" among them, which is trained, or "objective" in its stead.

        Each is reported as the sum of its values over the sum of its weights, 1 where there are none, over the whole
        split; the trained one is normalised so over the global batch.
        """
        raise NotImplementedError

    def forward(self, model: nn.Module, batch: Tree) -> Any:
        """What the network makes of a batch: a Tree."""
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def facts(self) -> Dict[str, Any]:
        """What to say of the network beside its settings, as JSON, in its metadata and its model card.

        "classes", a list of names, is what a classifier's measures by class are called by.
        """
        return {}

    def augment(self, batch: Tree, random: Random) -> Tree:
        """A training batch, changed at random."""
        return batch

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Any of torch.optim. The engine normalises, clips and guards the gradients, and restores it on resume."""
        return torch.optim.AdamW(model.parameters(), getattr(self.settings, "learning_rate", 1e-3), fused=True)

    def factor(self, step: int, steps: int) -> float:
        """The factor on the learning rate at this step of `steps`; see flyte_ddp.schedules."""
        return 1.0

    def derive(self, measures: Dict[str, float]) -> Dict[str, float]:
        """The measures to report: what is computed from others, such as a perplexity, is added here."""
        return measures

    def constant_loss(self) -> float:
        """The mean loss, on the split that each epoch is evaluated on, of the best prediction that is the same for all
        samples; 0 where it is not known.

        A training that is no better is warned of. Where it is not known, its outputs are tried on other samples.
        """
        return 0.0

    def predictions(self, outputs: Any, batch: Tree) -> Optional[Tensor]:
        """(n, ...) what to keep of each test sample, in predictions.npy; None keeps nothing."""
        return None

    def pictures(self, outputs: Any, batch: Tree) -> Sequence[Tuple[str, Tensor]]:
        """(caption, (C, H, W) from 0 to 1) for the report, C being 1 or 3, of some test samples."""
        return ()

    def everyone(self, mine: Tensor) -> Tensor:
        """(N, ...) of the whole global batch, with gradients, from this rank's (n, ...); all ranks have to call it.

        For losses that compare samples with one another. self.share.first is the place of the rank's first sample.
        """
        return gather_rows(mine, self.share)
