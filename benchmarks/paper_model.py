"""A model of step time and efficiency of data-parallel training on 1 to 1,024 GPUs.

`python -m benchmarks.paper_model` prints the table from the constants below; with --measure they are measured as far as
this machine allows (GPUs, or CPU ranks with gloo), and predicted steps are compared with measured ones; --plot FILE
draws it as SVG. On N GPUs:

    step = max(data, forward + backward + optimizer + the part of the all-reduces that outlasts the backward pass)
    all-reduce of a bucket = latency(N) + 2 (N - 1) / N * bytes / bandwidth(N)

Left out: stragglers and jitter, congestion, all-reduces that slow the backward pass down, the lower bandwidth of small
messages, the host's work for the input. All of them make real steps longer.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence, Tuple

GPUS = [2**power for power in range(11)]
BACKWARD = 0.6  # share of a step's computing, assumed


@dataclass(frozen=True)
class Network:
    """What computing a step costs a GPU, in seconds: fixed + per_image * batch.

    Attributes:
        buckets: bytes that DDP reduces at a time, and the share of the backward pass after which they are ready.
        batch: images per GPU for weak scaling; total: of all GPUs together for strong scaling.
        data: seconds to fetch an image, in parallel with computing.
    """

    name: str
    fixed: float
    per_image: float
    buckets: Tuple[Tuple[int, float], ...]
    batch: int
    total: int
    data: float = 0.0


@dataclass(frozen=True)
class Links:
    """Seconds and bytes per second: of a node of so many GPUs, and across nodes; hop is for each doubling of nodes."""

    latency: float
    bandwidth: float
    node: int = 1 << 30
    hop: float = 0.0
    across: float = math.inf


MNIST = Network("MNIST network", 0.8e-3, 0.3e-6, ((1_622_040, 0.1), (102_280, 1.0)), 128, 1024, 784 / 3.35e12)
RESNET = Network(
    "ResNet-50", 8e-3, (256 / 2470 - 8e-3) / 256, tuple((25_557_032, n / 4) for n in (1, 2, 3, 4)), 256, 16384, 1 / 3000
)
H100 = Links(latency=40e-6, bandwidth=480e9, node=8, hop=5.5e-6, across=350e9)

SOURCES = """
- cited: 480 GB/s bus bandwidth in an H100 node (NVIDIA/nccl-tests issues 309, 347); 350 GB/s across nodes with
  8 x 400 Gb/s InfiniBand each (366 on 4 nodes, issue 309; about 350 on 248 H200 nodes, issue 283)
- cited: 62 us for the smallest all-reduce on 16 H100 nodes (NVIDIA/nccl issue 1469). Assumed: 40 us of it in a node,
  and 5.5 us for each doubling of the nodes; from Python it can be more (116 us for 1 MB on 8 H100:
  IBM/pytorch-communication-benchmarks issue 1)
- cited: ResNet-50, 25,557,032 parameters, 2,470 images/s on an A100 80GB in mixed precision, taken for 256 images a GPU
  (NVIDIA/DeepLearningExamples, PyTorch ResNet50 v1.5). The same page has a speed-up of 6.72 on 8 A100, 7.72 in TF32
- assumed: the backward pass is 60 % of the computing; 8 and 0.8 ms for some 1,000 and 100 kernel launches of a step;
  ResNet-50's buckets are equal, and its input comes at 3,000 images/s per GPU; the MNIST network takes 0.3 us an image
  (14 MFLOP at 5 % of an H100's 990 TFLOP/s)
- known from the code: the MNIST network's buckets, 1,622,040 and 102,280 bytes; its data stay in HBM3 (3.35 TB/s)
"""


def all_reduce(gpus: int, size: float, links: Links) -> float:
    if gpus == 1:
        return 0.0
    nodes = -(-gpus // links.node)
    bandwidth = links.bandwidth if nodes == 1 else min(links.bandwidth, links.across)
    return links.latency + links.hop * math.log2(nodes) + 2 * (gpus - 1) / gpus * size / bandwidth


def exposed(gpus: int, backward: float, network: Network, links: Links) -> float:
    """How much longer the all-reduces, one after the other, take than the backward pass."""
    end = 0.0
    for size, ready in network.buckets:
        end = max(end, ready * backward) + all_reduce(gpus, size, links)
    return max(0.0, end - backward)


def step(gpus: int, batch: float, network: Network, links: Links) -> float:
    """Seconds of a step with this many images on each GPU."""
    compute = network.fixed + network.per_image * batch
    return max(network.data * batch, compute + exposed(gpus, BACKWARD * compute, network, links))


def weak(gpus: int, network: Network, links: Links) -> Tuple[float, float]:
    """Seconds and efficiency if the batch of each GPU stays the same."""
    seconds = step(gpus, network.batch, network, links)
    return seconds, step(1, network.batch, network, links) / seconds


def strong(gpus: int, network: Network, links: Links) -> Tuple[float, float]:
    """Seconds and efficiency if the batch of all GPUs together stays the same."""
    seconds = step(gpus, network.total / gpus, network, links)
    return seconds, step(1, network.total, network, links) / (gpus * seconds)


def table(networks: Sequence[Network], links: Links) -> str:
    heads = [f"{n.name}, {text}" for n in networks for text in (f"{n.batch} per GPU", f"{n.total:,} in total")]
    lines = [f"| GPUs | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for gpus in GPUS:
        cells = [kind(gpus, network, links) for network in networks for kind in (weak, strong)]
        lines.append(f"| {gpus:,} | " + " | ".join(f"{1e3 * s:.2f} ms, {e:.1%}" for s, e in cells) + " |")
    return "\n".join(lines)


def plot(path: Path, networks: Sequence[Network], links: Links) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paper", "font.size": 9}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        panels = zip(figure.subplots(1, 2), (weak, strong), ("each GPU's", "the whole"), strict=True)
        for axes, kind, fixed in panels:
            for network in networks:
                axes.plot(GPUS, [kind(gpus, network, links)[1] for gpus in GPUS], "o-", label=network.name)
            axes.set(title=f"{kind.__name__} scaling: {fixed} batch is fixed", xlabel="GPUs", xscale="log")
            axes.set(ylabel="efficiency", ylim=(0, 1.05))
            axes.set_xticks(GPUS[::2], [f"{gpus:,}" for gpus in GPUS[::2]])
            axes.minorticks_off()
        figure.axes[0].legend(loc="lower left")
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the constants as far as this machine allows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the efficiencies as SVG")
    arguments = parser.parse_args()
    mnist, links, measured = MNIST, H100, ""
    if arguments.measure:
        from benchmarks.paper_measured import measure  # which needs this module

        mnist, links, measured = measure()
    print(f"{table((mnist, RESNET), links)}\n{SOURCES}{measured}")
    if arguments.plot:
        plot(arguments.plot, (mnist, RESNET), links)


if __name__ == "__main__":
    main()
