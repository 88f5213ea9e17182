"""Environments like a user's."""

import ensurepip
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile


def make_environment(place: Path, has_pip: bool = False) -> None:
    """A new virtual environment that has what this one has, and pip, if asked for."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    if has_pip:  # unpacked alone: venv would have it compile itself and, until Python 3.11, install an old setuptools
        wheels = sysconfig.get_config_var("WHEEL_PKG_DIR") or Path(ensurepip.__file__).with_name("_bundled")
        (wheel,) = Path(wheels).glob("pip-*.whl")
        ZipFile(wheel).extractall(site)
    (site / "all.pth").write_text(sysconfig.get_path("purelib") + "\n")
    scripts = Path(sysconfig.get_path("scripts"))
    for name in ("pyflyte", "pyflyte-execute", "torchrun"):
        script = (scripts / name).read_text()
        (place / "bin" / name).write_text(re.sub(r"\A#!.*", f"#!{place}/bin/python", script))
        (place / "bin" / name).chmod(0o755)
