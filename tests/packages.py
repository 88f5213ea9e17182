"""What is registered with other values than the defaults: as few packages as will do, because each takes seconds."""

import json

from scripts.dry_run import Package
from tests.pod import package

KEY = "a-secret-key-that-must-not-travel"
SANDBOX = {
    "DDP_ATTEMPT_SECONDS": "3600",
    "DDP_INTERRUPTIBLE": "true",
    "DDP_MLFLOW_SECRET": "tracking/address",
    "DDP_NOTIFY": "email:me@example.org",
    "DDP_PROFILE": "sandbox",
    "DDP_WANDB_SECRET": "tracking/key",
    "DDP_WEBHOOK_SECRET": "hooks/url",
    "WANDB_API_KEY": KEY,
}


def full_package() -> Package:
    """With all that is left out by default."""
    return package(
        DDP_ANNOTATIONS=json.dumps({"example.org/cost": 'centre 7, "vision"'}),
        DDP_CONCURRENCY="3",
        DDP_CONSOLE="https://flyte.example.org/console",
        DDP_DATA_MIRROR="s3://bucket/originals",
        DDP_ENV=json.dumps({"HTTPS_PROXY": "http://proxy.example:3128", "QUOTES": "\"'"}),
        DDP_LABELS=json.dumps({"kueue.x-k8s.io/queue-name": "research"}),
        DDP_NOTIFY="slack:a@example.org,b@example.org",
        DDP_NOTIFY_PHASES="succeeded,failed",
        DDP_POD_TEMPLATE="spot",
        DDP_PROMOTE_TO="s3://bucket/mnist",
        DDP_WEBHOOK="https://hooks.example.org/1",
    )


def sandbox_package() -> Package:
    """For few resources, with secrets, and with the code archive that `register` uploads."""
    return package("--copy", "all", **SANDBOX)
