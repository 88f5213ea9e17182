"""The state at the end of an epoch's last step, for a notice that comes in the evaluation after it."""

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.engine.digest import sum_of_all
from flyte_ddp.engine.progress import Progress
from flyte_ddp.engine.torch_compat import pytree


class LastStep:
    """The content of a checkpoint without a copy of its tensors: it is good for as long as nobody changes them.

    Buffers, which an evaluation may change, are copied, and whatever is no tensor. All else has a digest, because the
    user's code may change it before the evaluation, as by weights that it swaps for their average, and would do so
    again after a resume.
    """

    def __init__(self, content: dict[str, Any], parts: Mapping[str, Any], progress: Progress, device: torch.device):
        """content: what a checkpoint has. parts: of the training, by name."""
        self.progress, self.device = progress, device
        buffers = {
            ("parts", part_name, name)
            for part_name, part in parts.items()
            if isinstance(part, nn.Module)
            for name, _ in part.named_buffers(remove_duplicate=False)
        }
        self._tensors: list[Tensor] = []

        def kept(path: tuple[Any, ...], leaf: Any) -> Any:
            keys = tuple(getattr(key, "key", None) for key in path)
            if keys[0] == "choice":  # the best weights never change in place
                return leaf
            if not isinstance(leaf, Tensor):
                return copy.deepcopy(leaf)
            if keys in buffers or keys[0] == "progress":
                return leaf.clone()
            self._tensors.append(leaf)
            return leaf

        self._content: dict[str, Any] | None = None
        with suppress(Exception):  # of parts of any kind: without this the evaluation goes on to its end
            copied = pytree.tree_map_with_path(kept, content)
            self._digest = self._digest_now()
            self._content = copied

    def is_whole(self) -> bool:
        """Return whether it is still what a checkpoint would have had."""
        return self._content is not None and self._digest_now() == self._digest

    def _digest_now(self) -> int:
        return int(sum_of_all(self._tensors, self.device))

    def state_dict(self) -> dict[str, Any]:
        """Return the content."""
        assert self._content is not None
        return self._content
