"""Training on a folder of image files, which need not fit into memory: one sub-folder per class, decoded on the fly.

pyflyte run workflows/image_folder.py image_folder_wf --folder FOLDER --images '{"image_size": 64}'
"""

from flytekit import task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.flyte1.data import init_by_content
from flyte_ddp.flyte1.index_images import attach, find_images, index_images
from flyte_ddp.flyte1.prepare import PreparedDataset
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte
from flyte_ddp.flyte1.train import TrainingOutputs, image_training, training_arguments
from flyte_ddp.recipes.hyperparameters import FolderHyperparameters
from flyte_ddp.settings import RunOptions

set_up_pyflyte()


# The folder is no part of the cache key: the index stands for its content
@task(**training_arguments(ignored_inputs=("options", "folder")))
def image_folder_task(
    hp: FolderHyperparameters,
    index: PreparedDataset,
    folder: FlyteDirectory,
    options: RunOptions,
    init: FlyteFile | None = None,
) -> TrainingOutputs:
    """Train hp.model on the images of the folder, with options.nproc ranks."""
    return image_training.run(hp, options, attach(index, folder), init)


@workflow
def image_folder_wf(
    folder: str = "",
    images: ImageSettings = ImageSettings(),
    hp: FolderHyperparameters = FolderHyperparameters(),
    options: RunOptions = RunOptions(),
    init: FlyteFile | None = None,
) -> TrainingOutputs:
    """Read every image of the folder once, then train on them, decoding them again in each epoch.

    Args:
        folder: path or URI, with one sub-folder of image files per class, or train and test folders of that form. By
            default the digits.
        images: which images to use, and their size.
        hp: the other settings that determine the result.
        options: how to run the training; the cache ignores them.
        init: the model_state of an earlier training to start from, or its final-checkpoint to continue from.
    """
    found = find_images(folder=folder, backend=hp.backend, nproc=options.nproc, batch_size=hp.batch_size)
    index = index_images(folder=found.folder, stamp=found.stamp, images=images)
    first = init_by_content(init=init)
    return image_folder_task(hp=hp, index=index, folder=found.folder, options=options, init=first)


if __name__ == "__main__":
    print(image_folder_wf())
