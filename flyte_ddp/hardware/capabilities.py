"""What torch can do on a machine, and how a training would use it. Standard library only."""

from dataclasses import dataclass

from flyte_ddp.launch.environment import World


@dataclass(frozen=True)
class TorchGpu:
    """A GPU that a rank can use."""

    name: str
    memory: int  # bytes
    capability: str  # NVIDIA's compute capability, such as 9.0


@dataclass(frozen=True)
class Capabilities:
    """What torch reports.

    Attributes:
        cuda, nccl: versions that this torch was built with; empty without.
        no_gpu: why torch cannot use a GPU; empty if it can.
        complaints: warnings while initialising the GPUs.
        peers: how many pairs of GPUs can access each other's memory directly, and how many pairs there are.
        cpu_bfloat16: the CPU's instructions for bfloat16.
        world, precision: of a training; None and empty if it would be refused, with the reason as refusal.
    """

    torch: str
    cuda: str
    nccl: str
    gpus: list[TorchGpu]
    no_gpu: str
    complaints: list[str]
    peers: tuple[int, int]
    cpu_bfloat16: list[str]
    world: World | None
    precision: str
    refusal: str
