from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from fakedist import cli
from fakedist.cli.job_options import jobs_of
from fakedist.cli.output import Output
from fakedist.cli.profile import profile as profile_command_line
from fakedist.errors import SetupError
from fakedist.launcher import doctor, launching
from fakedist.options import Job
from fakedist.rundir.outcome import Ending, Outcome


class Launched:
    """Stands in for the launch: notes the job, ends as told."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.streams: launching.Streams | None = None
        self.ending = Ending(Outcome.FINISHED, 0)
        self.printed: list[tuple[Path, Output, bool]] = []

    def profile(self, job: Job, output: Path | None, force: bool, streams: launching.Streams) -> tuple[Path, Ending]:
        self.job, self.streams = job, streams
        return Path("the-run"), self.ending

    def print_report(self, run_directory: Path, output: Output, *, all_layers: bool, **length: object) -> None:
        self.printed.append((run_directory, output, all_layers))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    launched = Launched()
    for name in ("WORLD_SIZE", "RANK", "SLURM_NTASKS", "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launching, "check", lambda job: None)
    monkeypatch.setattr(launching, "profile", launched.profile)
    monkeypatch.setattr("fakedist.cli.profile.print_report", launched.print_report)
    return launched


def profiled(launched: Launched, *arguments: str) -> Job:
    assert cli.main(["profile", "--world-size", "8", "--rank", "1", *arguments]) == 0
    assert launched.job is not None
    return launched.job


@pytest.mark.parametrize(
    "text", ["--lr 1e-4", "--rank 5 --json -o x --help -m module", "-- --rank", "-m", "--typo", ""]
)
def test_the_scripts_own_arguments_pass_through_untouched(launched: Launched, text: str) -> None:
    arguments = tuple(text.split())
    job = profiled(launched, "train.py", *arguments)
    assert (job.target, job.is_module, job.arguments, job.rank) == ("train.py", False, arguments, 1)


@pytest.mark.parametrize("spelled", [("-m", "pkg.train"), ("-mpkg.train",)])
@pytest.mark.parametrize("arguments", [("--lr", "1", "--rank", "5"), ("-m", "x"), ("--", "y"), ()])
def test_a_modules_own_arguments_pass_through_untouched(
    launched: Launched, spelled: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    job = profiled(launched, "--steps", "3", *spelled, *arguments)
    assert (job.target, job.is_module, job.arguments) == ("pkg.train", True, arguments)
    assert (job.rank, job.steps) == (1, 3)


def test_the_value_of_an_option_is_not_taken_for_an_option(launched: Launched) -> None:
    job = profiled(launched, "--env", "A=1", "--env=B=-m", "-o", "-m", "train.py", "-m", "x")
    assert job.environment == (("A", "1"), ("B", "-m"))
    assert (job.target, job.arguments) == ("train.py", ("-m", "x"))


def test_every_option_reaches_the_job(launched: Launched) -> None:
    text = (
        "--gpus-per-node 4 --device virtual --gpu h200 --gpu-memory 100GiB --steps 3 --timeout 60 --launcher slurm "
        "--collectives noop --values off --seed 7 train.py"
    )
    where = {"gpus_per_node": 4, "device": "virtual", "gpu": "h200", "gpu_memory_bytes": 100 << 30, "launcher": "slurm"}
    how = {"steps": 3, "timeout_s": 60.0, "collectives": "noop", "values": "off", "seed": 7}
    job = Job(world_size=8, rank=1, target="train.py", **where, **how)  # type: ignore[arg-type]
    assert profiled(launched, *text.split()) == job


def test_ranks_given_one_by_one_are_as_good_as_a_list() -> None:
    arguments = ["--world-size=8", "--rank=0", "--rank=4-5", "train.py"]
    with profile_command_line.make_context("profile", arguments) as context:
        values = dict(context.params)
        jobs = jobs_of(values.pop("arguments"), values.pop("module"), values)
    assert [job.rank for job in jobs] == [0, 4, 5]


def test_world_size_and_rank_come_from_the_environment_unless_nodes_are_given(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("RANK", "63")
    for given, expected in (([], (64, 63)), (["--nnodes=2", "--nproc-per-node=4", "--rank=7"], (8, 7))):
        assert cli.main(["profile", *given, "train.py"]) == 0
        assert launched.job is not None
        assert (launched.job.world_size, launched.job.rank) == expected


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("profile -m fakedist", "--world-size 1024"),
        ("profile --world-sise 8 train.py", "Did you mean '--world-size'?"),
        ("profile --wrold-size 8 --rank 0 train.py", "Did you mean '--world-size'?"),
        ("profile --world-size eight train.py", "--world-size is a whole number, not 'eight'"),
        ("profile --world-size 8 --rank 8 train.py", "rank 8 does not exist in a world of 8"),
        ("profile --world-size 8 --rank 0", "no script was given"),
        ("profile --world-size 8 --rank 0 --env A train.py", "--env is KEY=VALUE, not 'A'"),
        ("profile --world-size 8 --rank 0 --gpu-memory 80 train.py", "not a size with a unit"),
        ("profile --world-size 8 --rank 0 --device tpu train.py", "--device is one of cuda, virtual, not 'tpu'"),
        ("profil", "No such command 'profil'"),
        ("profile --json --format=markdown train.py", "--json and --format markdown contradict each other"),
        ("profile --format=html train.py", "'html' is not one of 'text', 'json', 'markdown'."),
        ("profile --world-size=8 --rank=0-3 --format=markdown x.py", "--format markdown is for one rank, and 4"),
        ("report run --table=blocks", "--table is for --format csv"),
        ("report run --json --format=text", "--json and --format text contradict each other"),
        ("report run --html --format json", "--html and --format json contradict each other"),
        ("report run --html --json", "--json and --html contradict each other"),
        ("report run -o a -o b", "was given 2 times, and takes one value"),
        ("report run --format json --format html", "was given 2 times, and takes one value"),
        ("compare a b --json --format markdown", "--json and --format markdown contradict each other"),
        ("check --annotations --json", "--annotations and --format json are both printed: give -o FILE"),
        ("doctor -o /nowhere/below/a/file --format=csv", "'csv' is not one of 'text', 'json'."),
    ],
)
def test_a_wrong_command_line_gets_one_clear_line_and_exit_code_2(
    launched: Launched, capsys: pytest.CaptureFixture[str], arguments: str, told: str
) -> None:
    assert cli.main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.err.startswith("fakedist: error: ")
    assert captured.err.count("\n") <= 2
    assert captured.out == ""
    assert launched.job is None


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        (Ending(Outcome.FINISHED, 0), 0, ""),
        (Ending(Outcome.STOPPED, 0), 0, ""),
        (Ending(Outcome.EXIT, 3), 3, "fakedist: exit 3: the script's own exit code"),
        (Ending(Outcome.EXCEPTION, 1, "ValueError: x"), 1, "fakedist: exit 1: the script raised ValueError: x"),
        (Ending(Outcome.OUT_OF_MEMORY, 4), 4, "fakedist: exit 4: the rank does not fit the GPU"),
        (Ending(Outcome.EXIT, 4), 4, "fakedist: exit 4: the script's own exit code"),
        (Ending(Outcome.KILLED, 139, "by SIGSEGV"), 139, "fakedist: exit 139: the script was killed by SIGSEGV"),
        (Ending(Outcome.INTERRUPTED, 130, "Ctrl-C"), 130, "fakedist: exit 130: the script was interrupted (Ctrl-C)"),
        (Ending(Outcome.TIMEOUT, 124), 124, "fakedist: exit 124: the time limit given with --timeout was reached"),
    ],
)
def test_the_last_line_says_whose_exit_code_it_is(
    launched: Launched, capsys: pytest.CaptureFixture[str], ending: Ending, code: int, last: str
) -> None:
    launched.ending = ending
    assert cli.main(["profile", "--world-size", "8", "--rank", "1", "train.py"]) == code
    assert capsys.readouterr().err.rstrip().rpartition("\n")[2] == last
    assert launched.printed == [(Path("the-run"), Output("text"), False)]


def test_json_sends_the_scripts_output_to_stderr(launched: Launched) -> None:
    profiled(launched, "--json", "--all-rows", "train.py")
    assert launched.streams is not None
    assert launched.streams.child_stdout == 2
    assert launched.printed == [(Path("the-run"), Output("json"), True)]


def test_torchruns_own_command_line_is_understood(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--nnodes=128 --nproc_per_node 8 --node_rank 3 --rdzv-backend=c10d --standalone --rank 1000 train.py -x"
    assert cli.main(["profile", *words.split()]) == 0
    assert launched.job is not None
    assert (launched.job.world_size, launched.job.gpus_per_node, launched.job.rank) == (1024, 8, 1000)
    assert launched.job.arguments == ("-x",)
    assert capsys.readouterr().err == (
        "fakedist: ignored, because only torchrun needs them: --node-rank, --rdzv-backend, --standalone\n"
    )


def test_the_result_goes_into_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: doctor.Diagnosis((), ("virtual",)))
    path = tmp_path / "new" / "doctor.json"
    assert cli.main(["doctor", "--json", "-o", str(path)]) == 0
    assert json.loads(path.read_text()) == {"devices": ["virtual"], "findings": []}
    assert capsys.readouterr().out == f"{path}\n"


def test_a_script_that_does_not_compile_is_shown_with_pythons_own_lines(
    tmp_path: Path, launched: Launched, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fakedist.launcher.checked_script import check_script

    monkeypatch.setattr(launching, "check", check_script)
    script = tmp_path / "bad.py"
    script.write_text("if x\n")
    assert cli.main(["profile", "--world-size", "8", "--rank", "1", str(script)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2] == "SyntaxError: expected ':'"
    assert lines[-1] == "fakedist: exit 1: the script does not compile; nothing was run"
    assert launched.job is None


def _raise(error: BaseException) -> Any:
    def raising(*args: object) -> None:
        raise error

    return raising


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (SetupError("no compiler", "apt-get install gcc"), 1, "fakedist: error: no compiler\n  apt-get install gcc\n"),
        (OSError(errno.ENOSPC, "No space left", "run.json"), 1, "fakedist: error: the disk is full (run.json)"),
        (OSError(errno.EROFS, "Read-only file system", "run.json"), 1, "fakedist: error: a file cannot be written or"),
        (MemoryError(), 1, "fakedist: error: there is too little memory\n  a recording takes up to"),
        (SetupError("a" * 1_000_000), 1, f"fakedist: error: {'a' * 2_000}... (1,000,000 characters)\n"),
        (KeyboardInterrupt(), 130, "fakedist: exit 130: interrupted\n"),
    ],
)
def test_one_printer_for_all_errors(
    launched: Launched,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    told: str,
) -> None:
    monkeypatch.setattr(launching, "check", _raise(error))
    assert cli.main(["profile", "--world-size", "8", "--rank", "1", "train.py"]) == code
    assert capsys.readouterr().err.lstrip().startswith(told)


@pytest.mark.parametrize(("devices", "code"), [(("virtual",), 0), ((), 1)])
def test_doctor_says_whether_a_device_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], devices: tuple[str, ...], code: int
) -> None:
    finding = doctor.MachineCheck("C compiler", "missing", "no C compiler was found", "apt-get install gcc")
    monkeypatch.setattr(doctor, "diagnose", lambda: doctor.Diagnosis((finding,), devices))
    assert cli.main(["doctor"]) == code
    out = capsys.readouterr().out
    assert "missing   C compiler   no C compiler was found\n" in out
    assert "apt-get install gcc" in out
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["devices"] == list(devices)


def test_without_a_rank_rank_0_runs_and_is_named(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "--world-size", "8", "--device", "virtual", "train.py"]) == 0
    assert "no --rank was given: rank 0 runs" in capsys.readouterr().err


def test_the_scripts_own_rank_chooses_none(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "--world-size", "8", "--device", "virtual", "train.py", "--rank=5"]) == 0
    assert "no --rank was given before the script, which gets its own: rank 0 runs" in capsys.readouterr().err
