"""What torch can do on a machine, and how a training would use it. Standard library only."""

from dataclasses import dataclass

from flyte_ddp.launch.environment import World


@dataclass(frozen=True)
class Capabilities:
    """What torch reports.

    Attributes:
        cuda, nccl: versions that this torch was built with; empty without.
        gpus: that a rank can use: name, memory and NVIDIA's compute capability.
        no_gpu: why torch cannot use a GPU; empty if it can.
        complaints: warnings while initialising the GPUs.
        peers: how many of the pairs of GPUs can access each other's memory directly.
        cpu_bfloat16: the CPU's instructions for bfloat16.
        world, precision: of a training; None and empty if it would be refused, with the reason as refusal.
    """

    torch: str
    cuda: str
    nccl: str
    gpus: list[str]
    no_gpu: str
    complaints: list[str]
    peers: str
    cpu_bfloat16: list[str]
    world: World | None
    precision: str
    refusal: str
