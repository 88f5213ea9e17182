"""docs/tour.md as its reader follows it: every block is run, in order, and its output has to be as shown."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

import pytest

from tests.commands import ROOT, free_port

pytestmark = pytest.mark.slow

TEXT = (ROOT / "docs" / "tour.md").read_text()
SETUP = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[0]
BLOCKS = re.findall(r"^```sh\n([^`]*)^```\n\n```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
# In one shell, as a reader has them; again if gloo's threads lose a race at the very end, as in PyTorch's own scripts
ALL = f"""
trap 'failed="$BASH_COMMAND"' ERR
for number in {{0..{len(BLOCKS) - 1}}}; do
    for try in {{1..10}}; do
        failed=
        . ../../$number.sh > ../../$number.txt 2>&1
        grep -q "terminate called without an active exception" ../../$number.txt || break
    done
    if [ -n "$failed" ]; then echo "$failed"; cat ../../$number.txt; exit 1; fi
done
"""
SHOWN = [output for _, output in BLOCKS]
# What differs between machines and between runs; all else has to be as shown
VARYING = {
    r"\d+\.\d s\b": r"\d+\.\d s",
    r"\d+\.\d+": r"(\d+\.\d+)",  # by as much as other processors round otherwise
    r"\b[0-9a-f]{16}\b": r"[0-9a-f]{16}",
    r"epoch \d+, step \d+": r"epoch \d+, step \d+",
    r"\d+ MiB": r"\d+ MiB",
    r"on laptop": r"on \S+",
    "…": ".*",
    r"Connection reset by peer": r"Connection (reset|closed) by peer",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[str]:
    """What each block has printed, in a copy of the scripts beside the library."""
    project = tmp_path_factory.mktemp("tour")
    ignored = shutil.ignore_patterns("__pycache__", "runs")
    shutil.copytree(ROOT / "docs" / "tour", project / "docs" / "tour", ignore=ignored)
    for name in ("flyte_ddp", "scripts", "workflows"):
        (project / name).symlink_to(ROOT / name)
    for number, (block, _) in enumerate(BLOCKS):
        (project / f"{number}.sh").write_text(block.replace("29500", str(free_port())))
    # Buffered, or two processes may write into each other's lines
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    subprocess.run(["bash", "-c", SETUP + ALL], cwd=project, env=environment, check=True, timeout=1200)
    return [(project / f"{number}.txt").read_text() for number in range(len(BLOCKS))]


@pytest.fixture(params=["as shown", "as run"])
def outputs(request) -> Sequence[str]:
    return SHOWN if request.param == "as shown" else request.getfixturevalue("said")


def figures(pattern: str, text: str) -> list[float]:
    return [float(figure) for figure in re.findall(pattern, text)]


def fingerprints(text: str) -> list[str]:
    return re.findall(r"^(?!Epoch \d of).*weights (\w{16})$", text, re.MULTILINE)


def test_each_block_has_an_output():
    assert len(BLOCKS) == 8
    assert TEXT.count("```sh\n") == 1 + len(BLOCKS)
    assert re.findall(r"^## (\d)\.", TEXT, re.MULTILINE) == list("12345678")


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_a_block_prints_what_is_shown(said, index):
    either = "|".join(f"(?:{pattern})" for pattern in VARYING)

    def general(found: "re.Match[str]") -> str:
        return next(to for pattern, to in VARYING.items() if re.fullmatch(pattern, found[0]))

    for line in SHOWN[index].splitlines():
        parts = re.split(f"({either})", line)
        pattern = "".join(re.sub(either, general, part) if n % 2 else re.escape(part) for n, part in enumerate(parts))
        (shown,) = re.finditer(f"^{pattern}$", line)
        alike = re.finditer(f"^{pattern}$", said[index], re.MULTILINE)
        assert any(numbers(found) == pytest.approx(numbers(shown), rel=0.01) for found in alike), (
            f"{line}\n\n{said[index]}"
        )


def numbers(found: "re.Match[str]") -> list[float]:
    """Of what a pattern has caught, without words."""
    return [float(one) for one in found.groups() if one and re.fullmatch(r"[\d.]*\d", one)]


def test_two_processes_have_the_losses_of_one_and_weights_alike(outputs):
    one, two, ddp, *_ = outputs
    losses = figures(r"loss ([\d.]+)", one)
    assert len(losses) == 5
    assert figures(r"loss ([\d.]+)", two) == pytest.approx(losses, abs=2e-4)
    assert figures(r"loss ([\d.]+)", ddp)[0] == pytest.approx(losses[-1], abs=2e-4)
    mine, other = fingerprints(two)
    assert mine == other == fingerprints(ddp)[0]


def test_a_batch_for_each_rank_changes_the_result_and_a_higher_rate_does_not_quite_restore_it(outputs):
    same, twice, mended = figures(r"loss ([\d.]+)", outputs[2])
    assert twice > 1.1 * mended > 1.2 * same


def test_the_sampler_measures_something_else_than_one_process(outputs):
    (alone,) = figures(r"accuracy ([\d.]+)", outputs[0])
    padded, sliced = figures(r": +([\d.]+) on", outputs[2])
    assert padded != pytest.approx(alone, abs=2e-4)
    assert sliced == pytest.approx(alone, abs=2e-4)


def test_resumed_training_pod_and_nodes_end_with_the_same_bits(outputs):
    resumed, undisturbed = fingerprints(outputs[5])
    assert [resumed] == [undisturbed] == fingerprints(outputs[6]) == fingerprints(outputs[7])
