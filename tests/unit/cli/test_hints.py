"""Commands that are nearly right, and the hint that can be typed instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.cli import main

_SIZE = ["profile", "--world-size", "8"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([*_SIZE, "--rank", "last", "train.py"], "--rank 7"),
        ([*_SIZE, "--rank", "-1", "train.py"], "--rank 7"),
        ([*_SIZE, "--rank", "x", "train.py"], "--rank 3"),
        (
            [*_SIZE, "torchrun", "--nproc-per-node", "4", "train.py", "--lr", "3"],
            "fakedist profile --world-size 8 --nproc-per-node 4 train.py --lr 3",
        ),
        ([*_SIZE, "python3", "-u", "train.py"], "fakedist profile --world-size 8 train.py"),
        ([*_SIZE, "/usr/bin/python", "train.py"], "fakedist profile --world-size 8 train.py"),
        ([*_SIZE, "python", "-m", "torch.distributed.run", "train.py"], "fakedist profile --world-size 8 train.py"),
        ([*_SIZE, "python", "-m", "pkg.train"], "fakedist profile --world-size 8 -m pkg.train"),
        ([*_SIZE, "-m", "torch.distributed.run", "train.py"], "fakedist profile --world-size 8 train.py"),
        (
            ["profile", "--gpu=h200", "train.py", "--lr", "3", "--world-size", "8", "--no-kernels", "x"],
            "fakedist profile --gpu=h200 --world-size 8 --no-kernels train.py --lr 3 x",
        ),
        ([*_SIZE, "--gpu", "h100", "--gpu", "b200", "train.py"], "give one of them: --gpu b200"),
        (
            [*_SIZE, "--gpu", "h100,b200", "--device=virtual", "train.py"],
            "fakedist time RUN --gpu h100,b200 then prices",
        ),
        (["profile", "nothere.py"], "give the path of a Python script"),
        (["diff", "a", "b"], "fakedist compare A B"),
        (["gpus"], "fakedist profile --gpu list"),
        (["train.py", "--lr", "3"], "fakedist profile --world-size 1024 --rank 0 train.py --lr 3"),
        (["ls"], "fakedist runs"),
        (["compare"], "fakedist compare A B; fakedist runs lists the runs here"),
        (["compare", "a"], "fakedist compare A B; fakedist runs lists the runs here"),
        (["time", "ranks"], "such as ranks/rank0"),
        (["compare", "swept", "run"], "such as swept/runs/0af/rank4"),
        (["nsys", "train.py"], "nsys profile --trace=cuda,nvtx -o REPORT python train.py"),
        ([*_SIZE, "--output"], "fakedist profile --help"),
        ([*_SIZE, "-m"], "fakedist profile --help"),
        (["report", "a", "b"], "fakedist report [RUN]; fakedist report --help"),
        (["calibrate", "a"], "fakedist calibrate RUN --from-trace FILE; fakedist calibrate --help"),
        (["run", "--full"], "fakedist report run --full"),
        (["nsys", "trace.json.gz"], "fakedist report trace.json.gz"),
        (["explain"], "fakedist explain CODE; fakedist explain --help"),
        (["match"], "fakedist match RUN...; fakedist match --help"),
        (["sweep", "--world-size=8", "--axis=tp=1,2", "--trials=0", "train.py"], "fakedist sweep --help"),
        (["report", "nothere"], "fakedist runs lists the runs here; fakedist profile makes one"),
        (["report", "trace.json.gz"], "profiler.export_chrome_trace(FILE) writes one"),
        (["report", "report.html"], "give what the page was made from"),
        (["report", "run/report.html"], "fakedist report run"),
        (["time", "run/trace.json.gz"], "fakedist report run"),
        (["report", "train.py"], "fakedist profile --world-size 8 --rank 0 train.py"),
    ],
)
def test_the_hint_can_be_typed(
    arguments: list[str],
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("train.py", "trace.json.gz", "step.nsys-rep"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "report.html").write_text("<!doctype html>")
    for name in ("ranks/rank0", "swept/runs/0af/rank4"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    for name in ("report.html", "run.json", "trace.json.gz"):
        (tmp_path / "run" / name).write_text("{}")
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(arguments) in (1, 2)
    assert hint in capsys.readouterr().err.splitlines()[-1]


def test_an_option_given_twice_alike_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SIZE, "--gpu", "nothing", "--gpu", "nothing", "--device", "virtual", "absent.py"]) == 2
    assert "given 2 times" not in capsys.readouterr().err


def test_a_script_that_is_no_text_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train").write_bytes(b"\x7fELF\0")
    assert main([*_SIZE, "--rank=0", "--device=virtual", "train"]) == 2
    assert "train is a binary file, not a Python script" in capsys.readouterr().err
