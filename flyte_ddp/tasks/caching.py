"""Tasks that a cluster remembers and a local run does not."""

from dataclasses import dataclass, replace
from typing import Any

from flytekit import PythonFunctionTask
from flytekit.extend import TaskPlugins

from flyte_ddp.tasks.flytekit_compat import metadata_of


@dataclass(frozen=True)
class OnClustersOnly:
    """The task_config of a task, or dynamic, whose cache is that of the cluster alone.

    For what a local run has to find out each time: whether this machine can do what is asked, which dataset is to be
    had here. On a cluster the same inputs have the same answer, and a remembered one needs no pod.
    """


class ClusterCachedTask(PythonFunctionTask):
    def local_execute(self, ctx: Any, **inputs: Any) -> Any:
        forgetful = replace(self.metadata, cache=False, cache_serialize=False, cache_ignore_input_vars=())
        with metadata_of(self, forgetful):
            return super().local_execute(ctx, **inputs)


TaskPlugins.register_pythontask_plugin(OnClustersOnly, ClusterCachedTask)
