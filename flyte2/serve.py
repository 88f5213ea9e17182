"""Serves what flyte2/promote.py has promoted, as an app of Flyte 2: see flyte_ddp.promote.serve.

DDP_PROMOTE_TO=s3://bucket/mnist flyte deploy --image trainer=registry.example.org/me/trainer:1 flyte2/serve.py app
"""

import flyte
import flyte.app

from flyte_ddp.attempt.registration import registration
from flyte_ddp.flyte2.environment import IMAGE

app = flyte.app.AppEnvironment(
    name="classifier",
    image=IMAGE,
    command=["python", "-m", "flyte_ddp.promote.serve", registration().promote_to, "--host", "0.0.0.0"],
    port=8080,
    resources=flyte.Resources(cpu=1, memory="2Gi"),
    scaling=flyte.app.Scaling(replicas=(1, 3)),
)
