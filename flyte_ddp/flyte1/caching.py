"""The reuse of results: those of the same code, and some only on a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from flytekit import PythonFunctionTask
from flytekit.core.cache import CachePolicy, VersionParameters
from flytekit.core.interface import extract_return_annotation
from flytekit.core.type_engine import TypeEngine
from flytekit.extend import TaskPlugins

from flyte_ddp.code.code_version import hash_of_body, with_installed
from flyte_ddp.flyte1.flytekit_compat import replaced_metadata


class CodeVersion(CachePolicy):
    """The cache version of a task whose result is decided by this code and these distributions.

    It also follows the body of the task's function, and the types of its outputs, which a cached result must have.

    Args:
        code: the version of the code, as of code_version.
        distributions: names of installed packages, whose versions count.
    """

    def __init__(self, code: str, distributions: Sequence[str] = ("torch",)):
        self.code = code
        self.version = with_installed(code, distributions)

    def get_version(self, salt: str, params: VersionParameters) -> str:
        outputs = extract_return_annotation(get_type_hints(params.func, include_extras=True).get("return"))
        types = {name: TypeEngine.to_literal_type(kind).to_flyte_idl() for name, kind in outputs.items()}
        return f"{salt}{self.version}{hash_of_body(params.func)}{types}"


@dataclass(frozen=True)
class OnClustersOnly:
    """The task_config of a task, or dynamic, that is cached only on a cluster.

    A local run must find out each time whether this machine can do what is asked, and which dataset is available here.
    On a cluster the same inputs have the same answer, and a cached one needs no pod.
    """


class ClusterCachedTask(PythonFunctionTask):
    """A task that a local run executes without its cache."""

    def local_execute(self, ctx: Any, **inputs: Any) -> Any:
        forgetful = replace(self.metadata, cache=False, cache_serialize=False, cache_ignore_input_vars=())
        with replaced_metadata(self, forgetful):
            return super().local_execute(ctx, **inputs)


TaskPlugins.register_pythontask_plugin(OnClustersOnly, ClusterCachedTask)
