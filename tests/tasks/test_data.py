"""The cache of a training goes by what the data are, not by where."""

from flytekit import Cache, task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.tasks.data import file_by_content, folder_by_content, weights_by_content

trained: "list[str]" = []


@task(cache=Cache(version="1"))
def train_on_folder(data: FlyteDirectory) -> int:
    trained.append(str(data))
    return len(trained)


@task(cache=Cache(version="1"))
def train_on_file(data: FlyteFile) -> int:
    trained.append(str(data))
    return len(trained)


@task(cache=Cache(version="1"))
def train_from(init: FlyteFile | None = None) -> int:
    trained.append(str(init))
    return len(trained)


@workflow
def weights_wf(init: FlyteFile) -> int:
    return train_from(init=weights_by_content(file=init))


@workflow
def folder_wf(folder: FlyteDirectory) -> int:
    return train_on_folder(data=folder_by_content(folder=folder))


@workflow
def file_wf(file: FlyteFile) -> int:
    return train_on_file(data=file_by_content(file=file))


def test_what_changed_is_trained_on_anew(tmp_path):
    file = tmp_path / "folder" / "a.txt"
    file.parent.mkdir()
    file.write_text("1")
    folder, path = FlyteDirectory(str(file.parent)), FlyteFile(str(file))
    first = folder_wf(folder=folder), file_wf(file=path)
    assert (folder_wf(folder=folder), file_wf(file=path)) == first
    file.write_text("12")
    second = folder_wf(folder=folder), file_wf(file=path)
    assert all(new > old for new, old in zip(second, first, strict=True))
    (file.parent / "b.txt").write_text("3")
    assert folder_wf(folder=folder) > second[0]
    assert file_wf(file=path) == second[1]


def test_weights_go_by_their_content_alone(tmp_path):
    first, copy = tmp_path / "model.pt", tmp_path / "copy.pt"
    first.write_text("1")
    copy.write_text("1")
    number = weights_wf(init=FlyteFile(str(first)))
    assert weights_wf(init=FlyteFile(str(copy))) == number
    first.write_text("2")
    assert weights_wf(init=FlyteFile(str(first))) > number
