"""The project that these trainings are of."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lightning.project import write_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its folder, which modules are imported from meanwhile."""
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    with pytest.MonkeyPatch.context() as here:
        here.syspath_prepend(str(folder))
        yield folder
