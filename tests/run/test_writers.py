import math
import struct
import sys
import types

import pytest
from tensorboardX.proto import event_pb2

from lm.base.errors import RunError, UsageError
from lm.run.folder import RunFolder
from lm.run.writers import TensorBoardWriter, WandbWriter


def events(folder: RunFolder) -> list[event_pb2.Event]:
    found = []
    for path in sorted(folder.tensorboard.iterdir()):
        content = path.read_bytes()
        while content:  # a record is its length (8 bytes), a checksum (4), the event, a checksum (4)
            (length,) = struct.unpack("<Q", content[:8])
            found.append(event_pb2.Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def shown(folder: RunFolder) -> dict[tuple[str, int], float]:
    """What TensorBoard draws: a session's start at a step hides what was written before at or after that step."""
    curves: dict[tuple[str, int], float] = {}
    for event in events(folder):
        if event.HasField("session_log") and event.session_log.status == event_pb2.SessionLog.START:
            curves = {(name, step): value for (name, step), value in curves.items() if step < event.step}
        for value in event.summary.value:
            assert (value.tag, event.step) not in curves
            curves[value.tag, event.step] = value.simple_value
    return curves


def test_rows_are_shown_as_scalars_by_step_before_the_writer_is_closed(tmp_path):
    folder = RunFolder(tmp_path)
    writer = TensorBoardWriter(folder)
    writer.write(5, {"step": 5, "loss": 2.5, "eval/stdlib": 3, "set": "stdlib", "done": True, "grad_norm": math.nan})
    found = shown(folder)
    writer.close()
    assert math.isnan(found.pop(("grad_norm", 5)))
    assert found == {("loss", 5): 2.5, ("eval/stdlib", 5): 3.0}


def test_a_resumed_run_has_one_curve(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    monkeypatch.setattr("os.getpid", lambda: 1)
    first = TensorBoardWriter(folder)
    for step in range(6):
        first.write(step, {"loss": float(step)})
    monkeypatch.setattr("os.getpid", lambda: 2)
    second = TensorBoardWriter(folder, first_step=3)
    for step in range(3, 8):
        second.write(step, {"loss": 10.0 + step})
    assert shown(folder) == {("loss", step): step + 10.0 * (step >= 3) for step in range(8)}


def test_a_full_disk_stops_the_writer_with_one_line(small_disk):
    writer = TensorBoardWriter(RunFolder(small_disk))
    (small_disk / "filler").write_bytes(b"x" * 900_000)

    def fill() -> None:
        for step in range(2000):
            writer.write(step, {f"curve{i}": 1.0 for i in range(50)})

    with pytest.raises(RunError, match="no space left"):
        fill()


def test_a_missing_wandb_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"\[wandb\]"):
        WandbWriter(RunFolder(tmp_path), {})


def test_a_run_folder_is_one_wandb_run_however_often_it_is_resumed(tmp_path, monkeypatch):
    started, logged = [], []
    run = types.SimpleNamespace(log=lambda row, step: logged.append((step, row)), finish=lambda: logged.append("end"))

    def init(**settings):
        started.append(settings)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for name in ("a", "a", "b"):
        writer = WandbWriter(RunFolder(tmp_path / name), {"steps": 3})
        writer.write(1, {"step": 1, "loss": 0.5, "set": "stdlib"})
        writer.close()
    assert started[0]["id"] == started[1]["id"] != started[2]["id"]
    assert all(settings["resume"] == "allow" for settings in started)
    assert logged == [(1, {"loss": 0.5}), "end"] * 3
