"""One training of benchmarks.against_trainers: `python -m benchmarks.trainers.measured JOB TRAINER RANKS EPOCHS SEED`.

It writes measures.json, steps.json and model.pt to the working directory, beside the trainer's own checkpoints.
"""

import json
import os
import pkgutil
import sys
from pathlib import Path
from unittest.mock import patch

from flyte_ddp import training

# Settings of a job besides those of all. Two ranks share 120 sentences evenly: what the Trainer repeats to fill a batch
# counts in its test loss
OWN = {"finetune_text": {"lora_rank": 0, "test_batch_size": 60}}
CLOCKED = "benchmarks.trainers.clocked"  # names, because importing them would import torch, which our parent doesn't


def main() -> None:
    job, trainer, *numbers = sys.argv[1:]
    ranks, epochs, seed = map(int, numbers)
    script = pkgutil.resolve_name(f"benchmarks.trainers.{job}_{trainer}:main")
    common = {"epochs": epochs, "seed": seed, "precision": "float32"}
    settings = pkgutil.resolve_name(f"{job}.settings:Settings")(**common, **OWN.get(job, {}))
    rank = int(os.environ.get("LOCAL_RANK", "0"))  # torchrun and Lightning set it; our ranks don't come by here
    if trainer == "ours":
        with patch.object(training, "WORKER", f"{CLOCKED}:run"):
            measures = script(settings, ranks)
    else:
        with pkgutil.resolve_name(f"{CLOCKED}:clocked_steps")(rank):
            measures = script(settings, ranks)
    if rank == 0:
        Path("measures.json").write_text(json.dumps(measures))


if __name__ == "__main__":
    main()
