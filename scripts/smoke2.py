"""A run of what flyte2/ has on a cluster of Flyte 2, with small inputs: make smoke2 IMAGE=… CLUSTER_CONFIG=…

MNIST twice, a sweep, a promotion, predictions; with DDP_NNODES, many nodes, too. Deploys the nightly promotion, without
activating it. Prints where each run is seen, and each action's phase, attempts, seconds and cache. The exit status is 0
if all succeeded and the second training came from the cache.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flyte
from flyte.errors import InitializationError
from flyte.models import ActionPhase
from flyte.remote import Action, ActionDetails, Run, Trigger
from flyteidl2.core.catalog_pb2 import CACHE_HIT

from flyte2 import inference, mnist, multinode, promote, sweep
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.sweep.search import Sweep

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the file that names the cluster")
    parser.add_argument("--image", required=True, help="trainer=NAME")
    parser.add_argument("--project")
    parser.add_argument("--domain")
    asked = parser.parse_args()
    flyte.init_from_config(
        asked.config, root_dir=ROOT, images=(asked.image,), project=asked.project, domain=asked.domain
    )
    found = []
    for number, run in enumerate(all_runs(completed)):
        for action in (ActionDetails.get_details(one.action_id) for one in Action.listall(for_run_name=run.name)):
            trained_again = number == 1 and (action.task_name or "").endswith(".train")
            found.append(action.phase == ActionPhase.SUCCEEDED and (is_cached(action) or not trained_again))
            print(f"{action.run_name:<30} {action.task_name or '':<30} {action.phase.value:<12} {action.attempts} "
                  f"{action.runtime.total_seconds():6.0f} s {'hit' if is_cached(action) else ''}")  # fmt: skip
    flyte.deploy(promote.workflow)
    nightly = Trigger.get(name="nightly", task_name="promote.main")
    print(f"trigger {nightly.name} of {nightly.task_name}: {'active' if nightly.is_active else 'not active'}")
    return 0 if found and all(found) else 1


def all_runs(start: Callable[..., Any]) -> Iterator[Any]:
    """Yield each run once it has ended. start: runs a task with its inputs, and waits for its end."""
    # A new seed avoids the cache of earlier days
    hp = Hyperparameters(dataset="digits", epochs=1, train_fraction=0.04, seed=int(time.time()) % 2**31)
    yield start(mnist.main, hp=hp)
    trained = start(mnist.main, hp=hp)
    yield trained
    model = trained.outputs()[0].model_state
    yield start(sweep.main, sweep=Sweep(values={"learning_rate": [0.03, 0.1]}), hp=hp)
    yield start(promote.main, place=f"{model.path.rpartition('/')[0]}/promoted", hp=hp)
    yield start(inference.main, model_state=model, shards=2)
    if "DDP_NNODES" in os.environ:
        yield start(multinode.main, hp=hp)


def completed(task: Any, **inputs: Any) -> Run:
    started: Run = flyte.run(task, **inputs)
    print(started.url)
    started.wait(quiet=True)
    return started


def is_cached(action: ActionDetails) -> bool:
    return bool(action.status.cache_status == CACHE_HIT)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InitializationError as error:
        needed = "CLUSTER_CONFIG must name a cluster that answers, its project and its domain"
        sys.exit(f'{needed}: {error} Correct it, or add ARGS="--project NAME --domain NAME".')
