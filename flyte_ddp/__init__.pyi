from flyte_ddp.attempt.summaries import RecipeSummary as RecipeSummary
from flyte_ddp.data.blocks.block_folder import BlockFolder as BlockFolder
from flyte_ddp.data.blocks.block_folder import write_blocks as write_blocks
from flyte_ddp.data.blocks.blocks import Blocks as Blocks
from flyte_ddp.data.blocks.parquet import Parquet as Parquet
from flyte_ddp.data.blocks.tar import TarImages as TarImages
from flyte_ddp.data.blocks.tar import index_tars as index_tars
from flyte_ddp.engine.own_loop.loop import Loop as Loop
from flyte_ddp.fields import setting as setting
from flyte_ddp.flyte1.data import file_by_content as file_by_content
from flyte_ddp.flyte1.data import folder_by_content as folder_by_content
from flyte_ddp.flyte1.data import new_folder as new_folder
from flyte_ddp.flyte1.data import stream as stream
from flyte_ddp.flyte1.data import weights_by_content as weights_by_content
from flyte_ddp.flyte1.prepare import PreparedDataset as PreparedDataset
from flyte_ddp.flyte1.prepare import prepare_dataset as prepare_dataset
from flyte_ddp.flyte1.recipe import RecipeOutputs as RecipeOutputs
from flyte_ddp.flyte1.recipe import RecipeTraining as RecipeTraining
from flyte_ddp.lightning.settings import LightningOptions as LightningOptions
from flyte_ddp.lightning.settings import LightningSettings as LightningSettings
from flyte_ddp.lightning.task import LightningTraining as LightningTraining
from flyte_ddp.model_files.model_metadata import read_metadata as read_metadata
from flyte_ddp.recipe import Measures as Measures
from flyte_ddp.recipe import Random as Random
from flyte_ddp.recipe import Recipe as Recipe
from flyte_ddp.recipes.classifier import Classifier as Classifier
from flyte_ddp.recipes.hyperparameters import Hyperparameters as Hyperparameters
from flyte_ddp.recipes.models import load_model as load_model
from flyte_ddp.script.task import ScriptOutputs as ScriptOutputs
from flyte_ddp.script.task import ScriptTraining as ScriptTraining
from flyte_ddp.settings import RunOptions as RunOptions
from flyte_ddp.settings import TrainingSettings as TrainingSettings
from flyte_ddp.training import train as train

MODULES: dict[str, str]
__all__: list[str]
__version__: str
