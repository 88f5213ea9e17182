"""timm's weights, a file of its model.safetensors, on a folder of images: first a new head alone, then all layers.

pyflyte run finetune_images/workflow.py finetune_images_wf --folder path/to/images --init path/to/model.safetensors
"""

from flytekit import task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from finetune_images.settings import Settings
from flyte_ddp import RecipeOutputs, RecipeTraining, RunOptions, folder_by_content, weights_by_content

HEAD = Settings(freeze="stem, stages", init_leave_out="head.fc", epochs=1, learning_rate=1e-2)
training = RecipeTraining("finetune_images.recipe:FinetuneImages")


@task(**training.arguments())
def train_images(init: FlyteFile, folder: FlyteDirectory, settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options, folder, init)


@workflow
def finetune_images_wf(
    init: FlyteFile, folder: FlyteDirectory, head: Settings = HEAD, settings: Settings = Settings()
) -> RecipeOutputs:
    images = folder_by_content(folder=folder)
    first = train_images(init=weights_by_content(file=init), folder=images, settings=head, options=RunOptions())
    return train_images(init=first.model_state, folder=images, settings=settings, options=RunOptions())
