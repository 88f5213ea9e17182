"""The exponential moving average of a network's weights and statistics."""

import torch
from torch import nn

from flyte_ddp.engine import torch_compat
from flyte_ddp.engine.sharding.sharding import is_shard, local


class Average:
    """The moving average of a network, kept without making the host wait for the device.

    torch.optim.swa_utils has one, too, but it makes the host wait for the device at every step.
    """

    def __init__(self, model: nn.Module, decay: float):
        frozen = [weight for weight in model.parameters() if not weight.requires_grad]  # is never copied
        self.model = torch_compat.copy_network(model, frozen).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, steps: int) -> None:
        """Move the average towards the network's present weights and buffers.

        Call it after each step. The average keeps the share min(decay, (1 + steps) / (10 + steps)) of its value, as in
        TensorFlow's ExponentialMovingAverage. Integer buffers are copied. Buffers whose shape has changed stay as they
        are.

        Args:
            model: the network that is trained.
            steps: the number of optimizer steps before the latest one.
        """
        # A state_dict would list tied weights under every name that they have
        own, others = (
            {name: local(value) for name, value in (*network.named_parameters(), *network.named_buffers())}
            for network in (self.model, model)
        )
        # Caches that grow are left out, and so are frozen weights, which both networks share unless they are sharded
        frozen = {name for name, one in model.named_parameters() if not one.requires_grad and is_shard(one)}
        fitting = [
            name
            for name, value in own.items()
            if name in others
            and name not in frozen
            and others[name].shape == value.shape
            and others[name].data_ptr() != value.data_ptr()
        ]
        averaged, current = ([values[name] for name in fitting] for values in (own, others))
        floats = [index for index, value in enumerate(averaged) if value.is_floating_point()]
        # With decay alone, the average of a short training would mostly be its first weights
        share = 1 - min(self.decay, (1 + steps) / (10 + steps))
        torch_compat.move_towards([averaged[i] for i in floats], [current[i] for i in floats], share)
        counts = sorted(set(range(len(averaged))) - set(floats))
        if counts:
            torch_compat.copy([averaged[i] for i in counts], [current[i] for i in counts])
