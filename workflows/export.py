"""The export of a trained image classifier as verified safetensors, torch.export and ONNX files, with a model card.

pyflyte run workflows/export.py export_wf --model_state model.pt
pyflyte run workflows/export.py export_folder_wf --folder FOLDER --model_state model.pt --images '{"image_size": 64}'
"""

from flytekit import dynamic, workflow
from flytekit.types.file import PythonPickledFile

from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.export.settings import ClassifierExport, FolderExport
from flyte_ddp.export.task import (
    ExportOutputs,
    check_export,
    check_folder_export,
    export_classifier,
    export_folder_classifier,
)
from flyte_ddp.flyte1.index_images import find_images, index_images
from flyte_ddp.flyte1.prepare import PreparedDataset, prepare_dataset
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte
from flyte_ddp.flyte1.resources import dynamic_resources
from flyte_ddp.recipes.hyperparameters import FolderHyperparameters, Hyperparameters
from flyte_ddp.settings import RunOptions
from workflows.image_folder import image_folder_wf
from workflows.mnist import pytorch_training_wf

set_up_pyflyte()


@dynamic(**dynamic_resources())
def model_to_export(
    model_state: PythonPickledFile | None, data: PreparedDataset, options: ClassifierExport
) -> PythonPickledFile:
    """Return the given weights, else those of a training by the defaults, which starts once the data are prepared."""
    if model_state is not None:
        return model_state
    hp = Hyperparameters(dataset=options.dataset, model=options.network)
    return pytorch_training_wf(hp=hp, options=RunOptions()).model_state


@workflow
def export_wf(
    model_state: PythonPickledFile | None = None, options: ClassifierExport = ClassifierExport()
) -> ExportOutputs:
    """Write a model in several formats, each of which must reproduce the test accuracy of the model.

    Args:
        model_state: the output of a training; without it, a model is trained first.
        options: the network, the dataset that it was trained on, and how to export; the first two may be left out if
            the weights have metadata, as training writes them.
    """
    data = prepare_dataset(name=check_export(model_state=model_state, options=options))
    model = model_to_export(model_state=model_state, data=data, options=options)
    return export_classifier(model_state=model, data=data, options=options)


@dynamic(**dynamic_resources())
def folder_model_to_export(
    model_state: PythonPickledFile | None,
    index: PreparedDataset,
    folder: str,
    images: ImageSettings,
    options: FolderExport,
) -> PythonPickledFile:
    """Return the given weights, else those of a training on the folder, which starts once its index is there."""
    if model_state is not None:
        return model_state
    hp = FolderHyperparameters(model=options.network)
    return image_folder_wf(folder=folder, images=images, hp=hp, options=RunOptions()).model_state


@workflow
def export_folder_wf(
    folder: str = "",
    images: ImageSettings = ImageSettings(),
    model_state: PythonPickledFile | None = None,
    options: FolderExport = FolderExport(),
) -> ExportOutputs:
    """Export a model of image_folder_wf as export_wf does. model.json and the card have classes, size and channels.

    Args:
        folder: the folder of images that the model was trained on, as of image_folder_wf.
        images: the images of the folder that it was trained on, and their size.
        model_state: the output of image_folder_wf; without it, a model is trained first.
        options: the network, which may be left out if the weights have metadata, and how to export.
    """
    checked = check_folder_export(model_state=model_state, images=images, options=options)
    found = find_images(folder=folder)
    index = index_images(folder=found.folder, stamp=found.stamp, images=checked)
    model = folder_model_to_export(model_state=model_state, index=index, folder=folder, images=images, options=options)
    return export_folder_classifier(model_state=model, index=index, folder=found.folder, options=options)


if __name__ == "__main__":
    print(export_wf())
