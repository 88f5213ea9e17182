"""The results of a training: weights, predictions and pictures in files, and the figures of each rank."""

import io
import platform
import resource
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.checkpoint import write_checkpoint
from flyte_ddp.engine.job import FINAL, LAST, PICTURES, PREDICTIONS, Job, TrainingResult
from flyte_ddp.engine.set_up import Parts
from flyte_ddp.engine.splits import Split
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.model_metadata import ModelMetadata, add_metadata
from flyte_ddp.recipe import Recipe
from flyte_ddp.storage import write_whole, writing_to
from flyte_ddp.weights import first_names

MOST_PICTURES = 24


def write_last(parts: Parts, job: Job) -> None:
    """Rank 0 writes the weights after the last epoch, if another one may be best, and its checkpoint if
    requested, or if training stops early, to be continued."""
    with writing_to(job.logs, "DDP_RUNS_DIR"):
        if parts.validation:
            _write_weights(parts, job, Path(job.logs, LAST), parts.state.history[-1].validation)
        if job.options.keep_checkpoint or job.settings.stop_after:
            content = {"identity": job.identity, "state": parts.state.state_dict()}
            write_checkpoint(Path(job.logs, FINAL), content)


def write_results(parts: Parts, tested: dict[str, float], predictions: Tensor | None, job: Job) -> None:
    """Rank 0 writes the results. tested: measures of the test split. predictions: (N, ...), if the recipe has any."""
    path = Path(job.model_path)
    with writing_to(path.parent, "DDP_RUNS_DIR"):
        _write_weights(parts, job, path, tested)
        if predictions is not None:
            np.save(Path(job.logs, PREDICTIONS), predictions.cpu().numpy())
        draw_pictures(parts.state, parts.test.split, Path(job.logs, PICTURES))


def _write_weights(parts: Parts, job: Job, path: Path, measures: dict[str, float]) -> None:
    state, size = parts.state, distributed.get_world_size()
    training = {"world_size": size, "hardware": hardware(state.device), "precision": parts.precision}
    metadata = build_metadata(state.recipe, job, parts.found.headline, measures, training, state.base.digest)
    export_model(state.base.without(state.evaluated), path, metadata)


def build_metadata(
    recipe: Recipe,
    job: Job,
    headline: str,
    measures: dict[str, float],
    training: dict[str, Any],
    base_digest: str = "",
) -> ModelMetadata:
    settings = job.settings
    return ModelMetadata(
        recipe=job.recipe,
        settings_class=f"{type(settings).__module__}:{type(settings).__qualname__}",
        settings=asdict(settings),
        data={"name": job.dataset, "digest": job.data_digest},
        facts=recipe.facts(),
        headline=headline,
        measures=measures,
        training=training,
        versions={"python": platform.python_version(), "torch": torch.__version__},
        base_digest=base_digest,
    )


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"


def result_of(parts: Parts, tested: dict[str, float]) -> TrainingResult:
    """tested: measures of the test split."""
    state, choice = parts.state, parts.state.choice
    return TrainingResult(
        epochs=state.history,
        warnings=state.watch.warnings,
        headline=parts.found.headline,
        train_samples=len(parts.train.split),
        test_samples=len(parts.test.split),
        precision=parts.precision,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        peak_gpu_bytes=torch.cuda.max_memory_allocated(state.device) if state.device.type == "cuda" else 0,
        validation_samples=len(parts.validation.split) if parts.validation else 0,
        tested=tested,
        chosen_epoch=choice.chosen(len(state.history) - 1) if choice else None,
        parameters=sum(parameter.numel() for parameter in state.model.parameters()),
        sample_flops=parts.found.sample_flops,
        hardware=hardware(state.device),
    )


@torch.inference_mode()
def draw_pictures(state: TrainingState, test: Split, path: Path) -> None:
    """Writes the recipe's pictures of the first test samples, if any, as an .npz for the report."""
    recipe, count = state.recipe, min(len(test), MOST_PICTURES)
    (tree,) = test.fetch([torch.arange(count)])
    vars(recipe.share).update(vars(BatchShare(0, count, count, alone=True)))
    outputs: Any | None = recipe.forward(state.evaluated.eval(), tree)
    drawn = recipe.pictures(outputs, tree)[:MOST_PICTURES]
    if drawn:
        images = [picture.detach().cpu().float().clamp(0, 1).mul(255).round().byte().numpy() for _, picture in drawn]
        captions = np.array([caption for caption, _ in drawn])
        arrays: Any = {str(number): image for number, image in enumerate(images)}
        np.savez(path, captions=captions, **arrays)


def layers_of(model: nn.Module) -> list[tuple[str, str, int]]:
    """Name, type and number of parameters of each module that has parameters of its own."""
    counted = (
        (name, type(module).__name__, sum(p.numel() for p in module.parameters(recurse=False)))
        for name, module in model.named_modules()
    )
    return [layer for layer in counted if layer[2]]


def export_model(weights: Mapping[str, Tensor], path: Path, metadata: ModelMetadata | None = None) -> None:
    """Writes a state_dict as a plain one of contiguous CPU tensors; path appears whole or not at all."""
    firsts = first_names(weights)
    copies = {name: weights[name].detach().cpu().contiguous() for name in {*firsts.values()}}
    buffer = io.BytesIO()
    torch.save({name: copies[first] for name, first in firsts.items()}, buffer)  # tied weights once
    if metadata:
        add_metadata(buffer, metadata)
    write_whole(path, buffer.getbuffer())
