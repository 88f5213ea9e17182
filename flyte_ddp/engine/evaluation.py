"""The measures of a trained network on a split, outside of training: on one rank, in float32."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.engine.batches.batches import Batch, EvaluationBatches
from flyte_ddp.engine.batches.splits import Split
from flyte_ddp.engine.job import Measured
from flyte_ddp.engine.measures import compute_pairs, compute_ratios, find_headline, sum_measures
from flyte_ddp.engine.monitor.best_tracker import is_lower_better
from flyte_ddp.engine.seeds import seed_part
from flyte_ddp.launch.link import Link
from flyte_ddp.recipe import Recipe

Pairs = dict[str, tuple[Tensor, Tensor]]


@torch.no_grad()
def measure(
    recipe: Recipe,
    network: nn.Module,
    split: Split,
    link: Link,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    on_batch: Callable[[Batch, Pairs], None] = lambda batch, pairs: None,
) -> Measured:
    """Measure a network on a whole split in this process alone, in batches of settings.test_batch_size.

    No gradients are computed. The recipe's `share` is changed, and the global random generators are seeded for each
    batch.

    Args:
        recipe: the recipe that measures the outputs.
        network: the trained network, on the split's device and in evaluation mode.
        split: the samples.
        link: told after each batch that the process is alive.
        forward: forward(network, tree) returns the outputs of a batch; None stands for the recipe's own. If the network
            is of another recipe, give that recipe's forward.
        on_batch: on_batch(batch, pairs) is called after each batch is measured. `pairs` has the values and weights of
            each measure by its name, (n,) each for n samples.

    Returns:
        The measures by name, the name of the main one, those that are shown in per cent, the number of samples, and for
        each measure whether lower is better, where that is known.

    Raises:
        InputError: The outputs are None. Or the recipe's measure() does not return one value for each sample, or not
            the same measures for each batch, with "loss" among them. Or derive() does not return names and numbers with
            a "loss". Or the recipe's headline is none of the measures.
    """
    names: Sequence[str] = ()
    sums = torch.zeros((), dtype=torch.float64, device=split.device)
    for batch in EvaluationBatches(split, recipe.settings.test_batch_size, rank=0, world_size=1):
        recipe.share = replace(batch.share, alone=True)
        seed_part(batch.seed, batch.share.part)
        outputs = (forward or recipe.forward)(network, batch.tree)
        pairs = compute_pairs(recipe, outputs, batch, names)
        names = list(pairs)
        sums = sums + sum_measures(pairs)
        on_batch(batch, pairs)
        link.heartbeat()
    measures = compute_ratios(recipe, names, sums.tolist())
    directions = {name: is_lower_better(recipe, name) for name in measures}
    return Measured(
        measures=measures,
        headline=find_headline(recipe, measures),
        percent=recipe.percent,
        samples=len(split),
        is_lower_better={name: lower for name, lower in directions.items() if lower is not None},
    )
