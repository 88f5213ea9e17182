"""What NVIDIA's driver says of the GPUs, asked through nvidia-smi, which shows all of them whatever CUDA is allowed."""

import re
import subprocess
from dataclasses import dataclass
from itertools import combinations
from typing import Dict, List

SECONDS = 30.0  # for an answer: it takes one or two where no persistence daemon runs, for ever where a GPU is broken
COLUMNS = ("index", "name", "memory.total", "memory.used", "mig.mode.current", "driver_version")
GPUS = (f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the matrix's head, on a terminal or not


class NotKnown(Exception):
    """Something could not be found out; the message is the reason."""

    def __str__(self) -> str:
        return f"not known: {first_line(str(self.args[0]))}"


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver knows it; text as nvidia-smi has it, where a number may be "[N/A]"."""

    index: str
    name: str
    memory_mib: str
    used_mib: str
    mig: str
    driver: str


def ask(*arguments: str) -> str:
    """What it prints; raises NotKnown."""
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except FileNotFoundError:
        raise NotKnown("there is no nvidia-smi here") from None
    except OSError as error:
        raise NotKnown(f"nvidia-smi cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise NotKnown(f"nvidia-smi gave no answer within {SECONDS:g} s") from None
    if done.returncode:
        raise NotKnown(first_line(done.stdout + done.stderr) or f"nvidia-smi ended with status {done.returncode}")
    return done.stdout


def parse_gpus(text: str) -> List[DriverGpu]:
    """From the lines of --query-gpu in the order of COLUMNS; raises NotKnown for a line that is none."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    for row in rows:
        if len(row) != len(COLUMNS) or not row[0].isdecimal():
            raise NotKnown(f"nvidia-smi says {first_line(text)}")
    return [DriverGpu(*row) for row in rows]


def parse_cuda(text: str) -> str:
    """The newest CUDA that the driver can run, from the head of nvidia-smi's overview; raises NotKnown."""
    found = re.search(r"CUDA(?: UMD)? Version: *(\d+\.\d+)", text)
    if not found:
        raise NotKnown("nvidia-smi does not say")
    return found[1]


def parse_links(text: str) -> Dict[str, List[str]]:
    """For each GPU its connections to all of them in order, from the matrix of `topo -m`; raises NotKnown."""
    rows = [line.split() for line in ESCAPES.sub("", text).splitlines()]
    head = next((row for row in rows if row[:1] == ["GPU0"]), [])
    names = [word for word in head if re.fullmatch(r"GPU\d+", word)]
    links = {row[0]: row[1 : 1 + len(names)] for row in rows if row and row is not head and row[0] in names}
    if not names or list(links) != names or any(len(cells) < len(names) for cells in links.values()):
        raise NotKnown(f"nvidia-smi topo -m says {first_line(text) or 'nothing'}")
    return links


def pairs(links: Dict[str, List[str]]) -> List[str]:
    """The connection of each pair of GPUs."""
    return [list(links.values())[a][b] for a, b in combinations(range(len(links)), 2)]


def first_line(text: str) -> str:
    """The first line that is not empty, no longer than a glance."""
    line = next((line.strip() for line in ESCAPES.sub("", text).splitlines() if line.strip()), "")
    return line if len(line) <= 160 else line[:157] + "..."
