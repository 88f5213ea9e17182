"""Environments like a user's."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment(place: Path, *options: str) -> None:
    """A new virtual environment that has what this one has, and pip, unless the options are without it."""
    subprocess.run([sys.executable, "-m", "venv", *options, place], check=True)
    if not options:  # Python 3.11 and older bring one that is too old; below is the one that we have
        python = str(place / "bin" / "python")
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "all.pth").write_text(sysconfig.get_path("purelib") + "\n")
    scripts = Path(sysconfig.get_path("scripts"))
    for name in ("pyflyte", "pyflyte-execute", "torchrun"):
        script = (scripts / name).read_text()
        (place / "bin" / name).write_text(re.sub(r"\A#!.*", f"#!{place}/bin/python", script))
        (place / "bin" / name).chmod(0o755)
