"""The weights that a recipe's model() itself freezes, such as the base of a LoRA.

No file that training writes has them, since model() provides them each time. A digest tells whether they are still the
same.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn


def add_module_versions(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the weights as a new state dict for model.load_state_dict(), with the versions of the network's modules.

    Neither argument is changed. Files of weights have no versions. Without a version, a module such as torchvision's
    MNASNet takes its weights for those of an earlier release.
    """
    versioned = model.state_dict()
    versioned.clear()
    versioned.update(weights)
    return versioned


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are not trained, by name."""
    weights = model.state_dict(keep_vars=True)  # named_parameters() would lack the other names of tied weights
    is_frozen = {name: isinstance(value, nn.Parameter) and not value.requires_grad for name, value in weights.items()}
    return {name: value.detach() for name, value in weights.items() if is_frozen[name]}


def compute_base_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values as hex; empty if there are no weights."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if weights else ""


class FrozenBase:
    """The part of a training's network that is left out of its checkpoints and results."""

    def __init__(self, model: nn.Module, names: Iterable[str] = ()):
        self._model = model
        self.names = frozenset(names)

    @cached_property
    def digest(self) -> str:
        """Return the digest of the base at its first use, which computes it once."""
        weights = self._model.state_dict()
        return compute_base_digest({name: weights[name] for name in self.names})

    def without(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state_dict of the network, or of its average, without the base."""
        return {name: value for name, value in model.state_dict().items() if name not in self.names}

    def load(self, model: nn.Module, rest: Mapping[str, Tensor]) -> None:
        """Load what `without` returned. Raises RuntimeError if it does not fit."""
        own = model.state_dict()
        model.load_state_dict(add_module_versions({**{name: own[name] for name in self.names}, **rest}, model))
