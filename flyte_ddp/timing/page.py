"""The timing study's page: curves, a table, and an explanation that depends on the measured figures."""

from statistics import median
from typing import Dict, List, NamedTuple, Sequence

from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.report.article import Drawing, Section, article
from flyte_ddp.report.figures import Curves, draw
from flyte_ddp.report.surroundings import surroundings
from flyte_ddp.timing.measurement import DATA_PARALLEL, METHODS, ONE_DEVICE, PROCESSES, Measurement, TimingOptions

UNIT = "images per device and batch"


class Spread(NamedTuple):
    """Images per second of all repeats of one method with one batch size."""

    median: float
    least: float
    most: float

    def compared(self, other: "Spread") -> int:
        """1 or -1 if all repeats were faster or slower than all of the other's, 0 if the ranges overlap."""
        return (self.least > other.most) - (self.most < other.least)

    def __str__(self) -> str:
        return f"{self.median:,.0f} [{self.least:,.0f}-{self.most:,.0f}]"


Table = Dict[str, Dict[int, Spread]]  # by method and batch size


def spreads(found: Sequence[Measurement]) -> Table:
    table: Dict[str, Dict[int, List[float]]] = {method: {} for method in METHODS}
    for one in found:
        table[one.method].setdefault(one.batch_size, []).append(one.images_per_second)
    return {
        method: {size: Spread(median(rates), min(rates), max(rates)) for size, rates in sorted(sizes.items())}
        for method, sizes in table.items()
    }


def timing_article(
    found: Sequence[Measurement], gpus: int, load: float, description: DatasetDescription, options: TimingOptions
) -> str:
    """The page for a Deck; load is the number of processes that were running on this machine before."""
    table = spreads(found)
    sizes = list(table[ONE_DEVICE])
    curves = Curves(
        "Images per second",
        {method: [(size, spread.median) for size, spread in line.items()] for method, line in table.items()},
        remark=f"Medians of {options.repeats} repeats, with their ranges.",
        logarithmic=True,
        x=UNIT,
        ranges={method: [(spread.least, spread.most) for spread in line.values()] for method, line in table.items()},
        ticks=sizes,
    )
    threads = {one.method: one.threads for one in found}
    devices = {one.method: one.devices for one in found}
    measured = Section(
        "Measured",
        [
            f"{options.model}, float32, test images of {description.name}: from host memory to scores on the device.",
            *explain(table, gpus, devices[PROCESSES], threads),
        ],
        [Drawing(curves.title, draw(curves))],
        caption=f"Images per second, median [range] of n = {options.repeats}",
        heads=(UNIT.capitalize(), *(f"{method} ({devices[method]})" for method in METHODS)),
        lines=[(str(size), *(str(table[method][size]) for method in METHODS)) for size in sizes],
    )
    lines = [("Running processes before", f"{load:.1f}"), *surroundings().items()]
    setup = Section("Set-up", caption="Where", heads=("", ""), lines=lines)
    return article("Timing of inference", "One device, nn.DataParallel, one process per device", [measured, setup])


def explain(table: Table, gpus: int, processes: int, threads: Dict[str, int]) -> List[str]:
    """What was measured, and why; differences count only if the ranges do not overlap."""
    method, size, best = max(
        ((method, size, spread) for method, line in table.items() for size, spread in line.items()),
        key=lambda entry: entry[2].median,
    )
    said = [
        f"The most here is {best} images per second, by {method} with {size} images a batch.",
        explain_batches(table[ONE_DEVICE]),
        explain_data_parallel(table[ONE_DEVICE], table[DATA_PARALLEL], gpus),
        explain_processes(table[ONE_DEVICE], table[PROCESSES], gpus, processes, threads),
    ]
    return [text for text in said if text]


def explain_batches(one: Dict[int, Spread]) -> str:
    smallest, largest = min(one), max(one)
    if smallest == largest:
        return ""
    if one[largest].compared(one[smallest]) <= 0:
        return "On one device, larger batches are no faster per image than smaller ones: none of these sizes is small."
    return (
        f"On one device an image takes {_milliseconds(one, smallest) / smallest:.3g} ms in batches of {smallest} and "
        f"{_milliseconds(one, largest) / largest:.3g} ms in batches of {largest}. Each forward pass costs the same "
        "calls, from Python down to the device, however few images it has, and a few images keep neither a GPU's nor a "
        "CPU's arithmetic units busy."
    )


def explain_data_parallel(one: Dict[int, Spread], parallel: Dict[int, Spread], gpus: int) -> str:
    if gpus < 2:
        different = [size for size in one if parallel[size].compared(one[size])]
        seen = f"differ with {_listed(different)} images a batch" if different else "overlap with every batch size"
        if gpus == 1:
            return (
                "There is one GPU here, so nn.DataParallel cannot share out a batch: it moves the batch to the GPU and "
                f"calls the network, with slightly more Python code. The ranges {seen}."
            )
        return (
            "There is no GPU here, so nn.DataParallel runs the network itself and can be neither faster nor slower "
            f"than one device. The ranges {seen}" + (", because this machine is noisy." if different else ".")
        )
    smallest = min(one)
    cost = _milliseconds(parallel, smallest, gpus) - _milliseconds(one, smallest)
    return (
        f"With nn.DataParallel, {gpus} GPUs reach {_ratios(parallel, one)} the throughput of one. For every batch a "
        "single Python process copies the weights to each GPU, deals out the images, runs a thread per GPU, of which "
        "only the one that holds the interpreter's lock can launch kernels, and collects the scores on the first GPU. "
        f"With {smallest} images per GPU, this adds {cost:.3g} ms to a batch."
    )


def explain_processes(
    one: Dict[int, Spread], many: Dict[int, Spread], gpus: int, processes: int, threads: Dict[str, int]
) -> str:
    if processes == 1:
        return "There is one device here, so one process per device is the same as one device."
    seen = f"{processes} processes reach {_ratios(many, one)} the throughput of one. "
    if gpus:
        return seen + (
            "Each has its own interpreter, GPU and weights, and waits for no other; they share only the host: its "
            "cores, its memory and the connections to the GPUs."
        )
    seen += (
        f"They share the same cores: one process computes with {threads[ONE_DEVICE]} threads, each of {processes} with "
        f"{threads[PROCESSES]}. "
    )
    faster = [size for size in one if many[size].compared(one[size]) > 0]
    slower = [size for size in one if many[size].compared(one[size]) < 0]
    if faster:
        seen += (
            f"With {_listed(faster)} images a batch processes are faster: the threads of one process synchronise after "
            "every operator, and between operators only one core works; processes do not wait for each other. "
        )
    if slower:
        seen += (
            f"With {_listed(slower)} images a batch they are slower: each has its own activations and weights, and "
            "they compete for the same caches and memory. "
        )
    if any(many[size].least > processes * one[size].most for size in one):
        seen += (
            f"More than {processes} times is more than the cores can provide: if other programs run on the machine, a "
            "thread that waits for a core delays the other threads of its process. "
        )
    same = [size for size in one if size not in (*faster, *slower)]
    if same:
        seen += f"With {_listed(same)} the ranges overlap: the threads of one process use the cores as well."
    return seen.strip()


def _milliseconds(line: Dict[int, Spread], size: int, devices: int = 1) -> float:
    """The time that one batch takes on all devices together."""
    return 1000 * devices * size / line[size].median


def _ratios(line: Dict[int, Spread], one: Dict[int, Spread]) -> str:
    ratios = {size: line[size].median / one[size].median for size in one}
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    if least == most:
        return f"{ratios[least]:.2f} times"
    return f"from {ratios[least]:.2f} times (with {least} images a batch) to {ratios[most]:.2f} times (with {most})"


def _listed(sizes: Sequence[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
