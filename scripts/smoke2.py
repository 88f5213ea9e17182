"""Runs flyte2/mnist.py twice on a cluster of Flyte 2 with small inputs: make smoke2 IMAGE=… CLUSTER_CONFIG=…

Prints each action's phase, attempts, seconds and cache. The exit status is 0 if both runs succeeded and the training of
the second one came from the cache.
"""

import argparse
import sys
import time
from pathlib import Path

import flyte
from flyte.models import ActionPhase
from flyte.remote import Action, ActionDetails, Run
from flyteidl2.core.catalog_pb2 import CACHE_HIT

from flyte2 import mnist
from flyte_ddp.recipes.hyperparameters import Hyperparameters

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="the file that names the cluster")
    parser.add_argument("--image", required=True, help="trainer=NAME")
    parser.add_argument("--project")
    parser.add_argument("--domain")
    asked = parser.parse_args()
    flyte.init_from_config(
        asked.config, root_dir=ROOT, images=(asked.image,), project=asked.project, domain=asked.domain
    )
    # of digits an epoch makes 25; a new seed avoids the cache of earlier days
    hp = Hyperparameters(dataset="digits", epochs=1, train_fraction=0.04, seed=int(time.time()) % 2**31)
    runs = [run(hp) for _ in range(2)]
    found = [action for one in runs for action in actions(one)]
    for action in found:
        seconds, cached = action.runtime.total_seconds(), "hit" if is_cached(action) else ""
        print(f"{action.run_name:<30} {action.task_name or '':<30} {action.phase.value:<12} {action.attempts} "
              f"{seconds:6.0f} s {cached}")  # fmt: skip
    again = [action for action in found if action.run_name == runs[1].name]
    trained = [action for action in again if (action.task_name or "").endswith(".train")]
    ok = all(action.phase == ActionPhase.SUCCEEDED for action in found) and all(map(is_cached, trained))
    return 0 if ok and trained else 1


def run(hp: Hyperparameters) -> Run:
    started: Run = flyte.run(mnist.main, hp=hp)
    print(started.url)
    started.wait(quiet=True)
    return started


def actions(run: Run) -> list[ActionDetails]:
    return [ActionDetails.get_details(action.action_id) for action in Action.listall(for_run_name=run.name)]


def is_cached(action: ActionDetails) -> bool:
    return bool(action.status.cache_status == CACHE_HIT)


if __name__ == "__main__":
    sys.exit(main())
