"""A BERT-like encoder, in a folder that save_pretrained wrote, learns to classify sentences.

pyflyte run finetune_text/workflow.py finetune_text_wf --init path/to/encoder --settings '{"lora_rank": 0}'
"""

from flytekit import task, workflow
from flytekit.types.directory import FlyteDirectory

from finetune_text.settings import Settings
from flyte_ddp import RecipeOutputs, RecipeTraining, RunOptions, folder_by_content

training = RecipeTraining("finetune_text.recipe:FinetuneText")


@task(**training.arguments())
def train_finetune_text(init: FlyteDirectory, settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run(settings, options, init=init)


@workflow
def finetune_text_wf(
    init: FlyteDirectory, settings: Settings = Settings(), options: RunOptions = RunOptions()
) -> RecipeOutputs:
    return train_finetune_text(init=folder_by_content(folder=init), settings=settings, options=options)
