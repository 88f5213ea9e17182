"""A trained image classifier as safetensors, torch.export and ONNX files that were verified, with a model card.

pyflyte run workflows/export.py export_wf --model_state model.pt
"""

from typing import List, NamedTuple, Optional

from flytekit import dynamic, workflow
from flytekit.types.file import PythonPickledFile

from flyte_ddp.export.settings import ClassifierExport
from flyte_ddp.export.task import ExportOutputs, check_export, export_classifier
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from flyte_ddp.tasks.prepare import PreparedDataset, prepare_dataset
from flyte_ddp.tasks.pyflyte import set_up_pyflyte
from flyte_ddp.tasks.resources import dynamic_resources
from workflows.mnist import pytorch_training_wf

set_up_pyflyte()


class Model(NamedTuple):
    """Weights, and what their training reported; nothing where they were given."""

    model_state: PythonPickledFile
    epoch_accuracies: List[float]


@dynamic(**dynamic_resources())
def model_to_export(
    model_state: Optional[PythonPickledFile], data: PreparedDataset, options: ClassifierExport
) -> Model:
    """The weights that were given, else those of a default training; the data are awaited, not used."""
    if model_state is not None:
        return Model(model_state, [])
    hp = Hyperparameters(dataset=options.dataset, model=options.model)
    trained = pytorch_training_wf(hp=hp, options=RunOptions())
    return Model(trained.model_state, trained.epoch_accuracies)


@workflow
def export_wf(
    model_state: Optional[PythonPickledFile] = None, options: ClassifierExport = ClassifierExport()
) -> ExportOutputs:
    """Writes a model in several formats, each of which has to give the test accuracy of the model.

    Args:
        model_state: the weights, as a training gives them; without one, such a training comes first.
        options: the network, the dataset that it was trained on, and how to export.
    """
    data = prepare_dataset(name=check_export(model_state=model_state, options=options))
    model = model_to_export(model_state=model_state, data=data, options=options)
    return export_classifier(
        model_state=model.model_state, data=data, accuracies=model.epoch_accuracies, options=options
    )


if __name__ == "__main__":
    print(export_wf())
