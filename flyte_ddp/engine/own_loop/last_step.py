"""The state at the end of an epoch's last step, for a notice that comes in the evaluation after it."""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.engine.digest import sum_of_all
from flyte_ddp.engine.progress import Progress
from flyte_ddp.engine.torch_compat import pytree


class LastStep:
    """A checkpoint's content without a copy of the weights: it is good for as long as nobody changes them.

    Tensors that an evaluation may change are copied, and whatever is no tensor. All others have a digest, because the
    user's code may change them before the evaluation. Code that swaps weights for their average, say, would do so
    again after a resume.
    """

    def __init__(
        self,
        content: dict[str, Any],
        progress: Progress,
        device: torch.device,
        is_copied: Callable[[tuple[Any, ...]], bool],
    ):
        """Take the content of a checkpoint.

        Args:
            content: what the checkpoint would have now.
            progress: the training's.
            device: where digests are computed.
            is_copied: returns whether an evaluation may change the tensor under these keys of content.
        """
        self.progress, self.device = progress, device
        self._tensors: list[Tensor] = []

        def kept(path: tuple[Any, ...], leaf: Any) -> Any:
            keys = tuple(getattr(key, "key", None) for key in path)
            if keys[0] == "choice":  # the best weights never change in place
                return leaf
            if not isinstance(leaf, Tensor):
                return copy.deepcopy(leaf)
            if is_copied(keys):
                return leaf.clone()
            self._tensors.append(leaf)
            return leaf

        self._content: dict[str, Any] | None = None
        with suppress(Exception):  # of parts of any kind: without this the evaluation goes on to its end
            copied = pytree.tree_map_with_path(kept, content)
            self._digest = self._digest_now()
            self._content = copied

    def is_whole(self) -> bool:
        """Return whether a checkpoint can be written: the content could be copied, and no weight has changed since."""
        return self._content is not None and self._digest_now() == self._digest

    def _digest_now(self) -> int:
        return int(sum_of_all(self._tensors, self.device))

    def state_dict(self) -> dict[str, Any]:
        """Return the content. Call it only if is_whole() returns True."""
        assert self._content is not None
        return self._content
