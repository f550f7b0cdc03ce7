"""A run whose recipe and code are a copy, and whose data are where they always were."""

from pathlib import Path

from phalanx.jobs.snapshot import snapshot_folder, unpack_snapshot
from train_harness import TrainHarness


def test_a_run_from_a_copy_takes_code_from_it_and_data_from_the_original(lab: TrainHarness, tmp_path: Path) -> None:
    recipe = lab.recipe_file({}, "carried")
    copy = tmp_path / "copy"
    unpack_snapshot(snapshot_folder(lab.folder).tar, copy)
    (copy / "few.txt").unlink()
    (copy / "faults.py").write_text((copy / "faults.py").read_text() + "\nprint('from', __file__)\n")
    run = lab.new_run()
    told = {"PHALANX_SNAPSHOT_DIR": str(copy), "PHALANX_SNAPSHOT_SOURCE": str(lab.folder)}
    with lab.start("train", copy / recipe.name, "--run", run.path, variables=told) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert lab.from_command_line(run, 0).digest == lab.train_reference().digest
    assert (run.logs / "attempt-0-rank-0.log").read_text() == f"from {copy / 'faults.py'}\n"
    environment = run.read_json(run.environment) or {}
    assert environment["folder"] == str(lab.folder)  # `phalanx generate` and the like need no copy
