"""Training within a task of Flyte 2, from typed inputs to typed outputs, and that of the built-in image classifiers."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import flyte
from flyte import storage
from flyte.io import Dir, File

from flyte_ddp.attempt import requested
from flyte_ddp.attempt.failures import attempt_error, format_urls, to_failure
from flyte_ddp.attempt.platform_training import ClassifierTraining, Training
from flyte_ddp.attempt.registration import SECRETS, registration
from flyte_ddp.attempt.summaries import TrainingSummary
from flyte_ddp.attempt.webhook import notifying_webhook
from flyte_ddp.data.description import StoredData
from flyte_ddp.errors import InputError
from flyte_ddp.flyte2 import handover, platform
from flyte_ddp.flyte2.attempt import one_attempt
from flyte_ddp.flyte2.data import downloaded, downloaded_once, output_file, output_folder
from flyte_ddp.flyte2.environment import (
    PAUSES,
    OwnSecrets,
    cached,
    find_secrets,
    labelled,
    make_environment,
    with_avoidance,
    with_grace,
)
from flyte_ddp.flyte2.inputs import set_up_flyte
from flyte_ddp.launch.environment import is_first_rank
from flyte_ddp.launch.failures import Failure
from flyte_ddp.launch.grace import POD_VARIABLE
from flyte_ddp.settings import RunOptions, TrainingSettings

Data: TypeAlias = File | Dir | None
Outputs = TypeVar("Outputs")


class Flyte2Training(Training[Data, Outputs]):
    """A training within a task of Flyte 2, on one node or many.

    The task is an async function, although it awaits nothing, so that it runs in the pod's main thread. Only that
    thread is told that the pod is asked to stop, and has a checkpoint written.
    """

    platform = platform
    downloaded = staticmethod(downloaded)
    downloaded_once = staticmethod(downloaded_once)
    output_file = output_model = staticmethod(output_file)
    output_folder = staticmethod(output_folder)
    own_errors = staticmethod(one_attempt)
    _graces: frozenset[str] = frozenset()  # of the environments so far, in seconds

    def environment(
        self,
        name: str,
        most_gpus: int | None = None,
        resources: flyte.Resources | None = None,
        secrets: OwnSecrets = (),
        env_vars: Mapping[str, str] = MappingProxyType({}),
        include: Sequence[str] = (),
        **more: Any,
    ) -> flyte.TaskEnvironment:
        """Patch Flyte's SDK, and return the environment of the task, with the recipe's and the observers' files.

        Call it at the top level of the file with the task. The pod checks that its code is the recipe's.

        Args:
            name: the environment's name.
            most_gpus: the number of GPUs that the task can use: 1 for a task that predicts; None means any number. The
                pod gets the registered number if that is smaller. Ignored if `resources` sets gpu.
            resources: your own resources. Each value that is not None replaces the registered one. CPUs, memory and
                disk that are neither given nor registered follow from the number of GPUs.
            secrets: secrets to add. Each replaces the registered secret that is put into the same variable.
            env_vars: variables to add. Each replaces any other of the same name.
            include: more files to ship.
            more: the arguments from clustered(), for many nodes, and your own of flyte.TaskEnvironment. A pod_template
                gets the registered labels and annotations, and the registered grace if it sets none. The grace is the
                time from a SIGTERM until the pod is killed. Others, such as interruptible=, replace the registered
                ones.

        Raises:
            InputError: a DDP_ environment variable is invalid; a registered secret is not named GROUP/KEY; or the pod
                template is the name of one in the cluster, although labels, annotations or avoid_hosts are registered.
        """
        set_up_flyte()
        asked = registration()
        files = {*self.code.files}
        for observer in self.observers:
            files |= {*observer.files}
        gpus = requested.training_gpus(most_gpus)
        if resources and resources.gpu is not None:
            device = resources.get_device()
            gpus = device.quantity if device else 0
        template, grace = with_grace(more.pop("pod_template", asked.pod_template))
        variables = {
            **requested.training_environment(gpus, self.code.version),
            **grace,
            **requested.webhook_environment(),
            **requested.avoidance_environment(asked.retries),
            **more.pop("variables", {}),
            **env_vars,
        }
        self._graces |= {variables[POD_VARIABLE]}
        return make_environment(
            name, requested.training_size(gpus), variables, [*sorted(files), *include], own=resources,
            secrets=find_secrets(SECRETS, secrets), pod_template=with_avoidance(template),
            **{"interruptible": asked.interruptible, **more},
        )  # fmt: skip

    def arguments(self, ignored: Sequence[str] = ("options",), **own: Any) -> dict[str, Any]:
        """Return the keyword arguments of the task that trains or predicts: cache, retries, live report and time limit.

        The cache key has the version of the recipe's code, torch's version and the inputs that are not ignored. Retries
        and the time limit are the registered ones.

        Args:
            ignored: names of the task's inputs that the cache ignores.
            own: your own arguments of the task, which replace these. A pod_template gets the registered labels and
                annotations, and the registered grace if it sets none.

        Raises:
            InputError: Your pod_template has another grace than the environments that environment() has made or,
                without any, than the registered one: give the template to environment() instead. Or your pod_template
                is the name of one in the cluster, although labels, annotations or avoid_hosts are registered.
        """
        if "pod_template" in own:
            template, grace = with_grace(own["pod_template"])
            seconds = grace[POD_VARIABLE]
            expected = self._graces or {with_grace(registration().pod_template)[1][POD_VARIABLE]}
            if seconds not in expected:
                raise InputError(
                    "a task's own pod_template must have the grace of its environment, "
                    f"{' or '.join(sorted(expected, key=int))} s, got {seconds} s: give the template to "
                    "environment(pod_template=...) instead"
                )
            own["pod_template"] = labelled(with_avoidance(template))
        return {
            "cache": cached(f"{self.code.name} {self.code.version}", ignored, ["torch"]),
            "retries": flyte.RetryStrategy(registration().retries, PAUSES),
            "report": True,
            "timeout": flyte.Timeout(max_runtime=timedelta(seconds=registration().attempt_seconds)),
            **own,
        }

    def run_as_rank(
        self, settings: TrainingSettings, options: RunOptions, data: Data | StoredData = None, init: Data = None
    ) -> Outputs | None:  # as its base says, in a task whose environment is clustered
        with naming_the_cause():
            if is_first_rank():
                handover.leave_place()
            return super().run_as_rank(settings, options, data, init)


@dataclass(frozen=True)
class TrainingOutputs:
    """The outputs of an image classifier's training, with the fields of flyte_ddp.flyte1.train.TrainingOutputs."""

    epoch_accuracies: list[float]
    model_state: File
    summary: TrainingSummary
    report: File
    logs: Dir


class ImageTraining(ClassifierTraining[Data, TrainingOutputs], Flyte2Training[TrainingOutputs]):
    """A training of an image classifier on a prepared dataset."""

    outputs = TrainingOutputs


image_training = ImageTraining()


# --- many nodes ---


@contextmanager
def naming_the_cause() -> Iterator[None]:
    """Let rank 0 raise the failure that was the cause if the block fails on a cluster; a context manager.

    Every rank uses one around its work; it is no collective. Flyte shows only rank 0's error, and decides by it about a
    retry.

    - Each rank writes its failure to the storage, unless another rank's failure caused it.
    - If rank 0's own error reports a hang or the loss of another rank, rank 0 raises the earliest failure in the
      storage, if there is one, in place of its own. Its error is an AttemptError or a FinalError.
    - Rank 0 also notifies the webhook, and leaves the failure for the action that flyte_ddp.flyte2.sizes starts next
      for the same training, with another number of nodes.
    - The other ranks raise their own error unchanged. In a local run, every rank does so, and nothing is written.
    """
    try:
        yield
    except Exception as error:
        if platform.is_local():
            raise
        own = to_failure(platform, error)
        others = f"{platform.logs_url()}/failures"
        rank = os.environ.get("RANK", "0")  # without torchrun there are no other ranks
        if (own.is_effect or own.kind == "hang") and rank == "0":
            own = next(iter(_causes(others)), own)
        elif not own.is_effect:
            handover.put_failure(own, others, f"rank-{rank}.json")
        if rank == "0":
            handover.leave_failure(own)
            with notifying_webhook(platform):
                raise attempt_error(platform, own, format_urls(platform)) from None
        raise


def _causes(folder: str) -> list[Failure]:
    """Return the failures that ranks have left in the folder, the earliest first; none if they cannot be read."""
    try:
        files = storage.get_underlying_filesystem(path=folder)
        left = [Failure(**json.loads(files.cat_file(path))) for path in files.find(folder)]
    except Exception:  # each storage has errors of its own, and may raise one if there is no such folder
        return []
    return sorted(left, key=lambda failure: failure.at)
