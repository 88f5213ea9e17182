"""Ranks that are killed while they write a sharded checkpoint; hosts that do not share its folder."""

import pytest

from tests.programs import run_program

KILLS = """if True:
    import os, shutil, signal, sys
    from datetime import timedelta
    from pathlib import Path
    import torch
    from torch import distributed
    from flyte_ddp.engine.checkpoints.checkpoint import FORMAT, read_checkpoint
    from flyte_ddp.engine.checkpoints.shard_writer import ShardWriter, SharedFolder, StorageDestination
    from flyte_ddp.engine.checkpoints.sharded_checkpoint import find_problem
    from flyte_ddp.engine.sharding.sharded_state import Shard, cut_rows
    from flyte_ddp.launch.environment import Environment, World
    from flyte_ddp.manifest import shards_beside
    from flyte_ddp.recipe import CPU

    SIZE, root, is_stored = 2, Path(sys.argv[1]), sys.argv[2] == "storage"
    path = root / "place" / "checkpoint"
    operations = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree")

    class Storage:
        # The folder of the checkpoint; each rank has a disk of its own

        def __init__(self, path):
            self.path = path

        def put(self, file):
            stored = path.parent / file.relative_to(self.path.parent)
            stored.parent.mkdir(parents=True, exist_ok=True)
            beside = stored.with_name(f"{stored.name} of {os.getpid()}")
            shutil.copyfile(file, beside)
            os.replace(beside, stored)

        put_manifest = put

    def save(rank, steps, victim=-1, kill_at=0):
        meeting = dict(init_method=f"file://{root}/rendezvous", rank=rank, world_size=SIZE)
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60), **meeting)
        environment = Environment(World(SIZE, SIZE, "gloo", "cpu"), rank, rank, "", 1)
        disk = root / "place" / f"disk {rank} {os.getpid()}"
        disk.mkdir()
        place = StorageDestination(Storage(disk / "checkpoint")) if is_stored else SharedFolder(path, environment)
        writer = ShardWriter(place, environment)
        count, last = 0, False

        def watch(event, _):
            nonlocal count
            if last and rank == victim and event in operations:
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL) if is_stored else os.killpg(0, signal.SIGKILL)

        sys.addaudithook(watch)
        for step in steps:
            last = step == steps[-1]
            first, end = cut_rows(7, rank, SIZE)
            shard = Shard(torch.full((end - first, 2), float(step)), torch.Size((7, 2)))
            progress = {"epoch": 0, "step": step}
            state = {"progress": progress, "shard": shard, "whole": torch.full((2,), float(step))}
            try:
                writer.begin({"format": FORMAT, "identity": {}, "state": state}, CPU)()
                distributed.barrier()  # rank 0 is the last to end
            except (OSError, RuntimeError):  # another rank is gone
                os._exit(signal.SIGKILL)
        os._exit(0)

    def run(*arguments):
        (root / "rendezvous").unlink(missing_ok=True)
        ended, held = os.pipe()
        leader = os.fork()
        if not leader:
            os.setpgid(0, 0)
            for rank in range(SIZE):
                if not os.fork():
                    save(rank, *arguments)
            os._exit(any([os.wait()[1] for _ in range(SIZE)]))
        os.close(held)
        os.read(ended, 1)  # until none of them is left
        os.close(ended)
        status = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
        assert status in (0, is_stored, -signal.SIGKILL), status
        return status == 0

    def whole():
        content = read_checkpoint(path, {})
        assert not any(find_problem(*shard) for shard in content["shards"].items())
        state = content["state"]
        step = state["progress"]["step"]
        for tensor in (state["shard"], state["whole"]):
            assert set(tensor.read().flatten().tolist()) == {step}, step
        assert state["shard"].shape == (7, 2)
        return step

    def folders():
        return len([*shards_beside(path).iterdir()])

    kills, runs, seen = 0, 0, set()
    (root / "place").mkdir()
    for victim in range(SIZE):
        ended, kill_at = False, 0
        while not ended:
            kill_at, runs = kill_at + 1, runs + 1
            old, new = 2 * runs - 1, 2 * runs
            ended = run([old, new], victim, kill_at)  # it finds nothing in its way of what was killed before it
            found = whole()
            assert found in ((new,) if ended else (old, new)), (found, new)
            kills += not ended
            seen.add(found == new)
            assert folders() <= (2 * runs if is_stored else 2 - ended)  # storage keeps what a start leaves
    assert seen == {False, True}, seen
    print(kills)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "storage"])
def test_ranks_that_are_killed_before_any_operation_leave_the_old_one_or_the_new_one(tmp_path, kind):
    """Just before one of them makes its n-th operation on a file or folder: in a folder all at once, else that one."""
    (tmp_path / "kills.py").write_text(KILLS)
    said = run_program(tmp_path / "kills.py", str(tmp_path), kind)
    assert said.error == ""
    assert int(said.printed) >= 18


HOSTS = """if True:
    import os, sys
    from pathlib import Path
    from torch import distributed
    from flyte_ddp.engine.checkpoints.shard_writer import SharedFolder
    from flyte_ddp.errors import InputError
    from flyte_ddp.launch.environment import Environment, World

    root, is_shared = Path(sys.argv[1]), sys.argv[2] == "shared"
    rank = 0 if os.fork() else 1
    own = root / ("shared" if is_shared else f"disk of {rank}")
    own.mkdir(exist_ok=True)
    os.chdir(own)
    distributed.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
    try:
        SharedFolder(Path("checkpoint"), Environment(World(2, 1, "gloo", "cpu"), rank, 0, "", 1))
        refused = False
    except InputError as error:
        refused = "one that all hosts share" in str(error) and "which rank 1 does not see" in str(error)
    distributed.barrier()
    status = refused == is_shared or any(own.iterdir())
    if rank:
        os._exit(status)
    print("the statuses:", int(status), os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "apart"])
def test_hosts_that_do_not_share_the_folder_are_refused(tmp_path, kind):
    """The folder is named alike on both, but each may have its own."""
    (tmp_path / "hosts.py").write_text(HOSTS)
    said = run_program(tmp_path / "hosts.py", str(tmp_path), kind)
    assert (said.error, said.printed) == ("", "the statuses: 0 0\n")
