"""The configuration: valid ones are read, anything else is refused with one clear line.

Findings that fail a check are selected by code, path and job.
"""

from pathlib import Path

import pytest

from fakedist.check.config import Figure, find_config, read_config
from fakedist.cli import main
from fakedist.errors import CheckError
from fakedist.rundir.finding import Finding

GIB = 1 << 30
JOB = """
[[check.jobs]]
name = "llama"
script = "train.py"
world_size = 1024
"""

EVERYTHING = """
[check]
baselines = "reports/baselines"
max_increase = "1%"

[[check.jobs]]
name = "llama-70b.fsdp"
module = "pkg.train"
arguments = ["--tp", "8"]
world_size = 1024
ranks = [0, 1023]
gpus_per_node = 4
gpu = "h200"
gpu_memory = "100 GiB"
steps = 3
launcher = "slurm"
collectives = "noop"
values = "off"
seed = 7
with_peers = true
timeout = 600
env = { B = "2", A = 1 }
max_increase = { peak_allocated = "256 MiB", layers = { "layers.*.mlp" = "2%" } }

[check.jobs.budgets]
peak_allocated = "72 GiB"
peak_reserved = "76GB"
headroom = "5%"
categories = { activation = "40 GiB" }
layers = { "layers.*.mlp" = "3 GiB" }
groups = { tp = "130 GiB" }

[[check.jobs]]
name = "gpt"
script = "train.py"
arguments = "--model 'g p t'"
world_size = 8
"""


def written(folder: Path, text: str, name: str = "fakedist.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_every_key_reaches_the_job(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, EVERYTHING))
    first, second = config.jobs
    assert config.baselines == tmp_path / "reports/baselines"
    assert [job.rank for job in first.jobs] == [0, 1023]
    job = first.jobs[1]
    assert (job.target, job.is_module, job.arguments, job.world_size) == ("pkg.train", True, ("--tp", "8"), 1024)
    assert (job.gpus_per_node, job.gpu, job.gpu_memory_bytes, job.steps) == (4, "h200", 100 * GIB, 3)
    assert (job.launcher, job.collectives, job.values, job.seed) == ("slurm", "noop", "off", 7)
    assert (job.timeout_s, job.environment, job.device) == (600, (("A", "1"), ("B", "2")), "virtual")
    assert job.with_peers
    assert {limit.figure: (limit.amount, limit.is_fraction) for limit in first.budgets} == {
        Figure("peak_allocated"): (72 * GIB, False),
        Figure("peak_reserved"): (76e9, False),
        Figure("headroom"): (0.05, True),
        Figure("categories", "activation"): (40 * GIB, False),
        Figure("layers", "layers.*.mlp"): (3 * GIB, False),
        Figure("groups", "tp"): (130 * GIB, False),
    }
    assert {limit.figure: (limit.amount, limit.is_fraction) for limit in first.tolerances} == {
        Figure("peak_allocated"): (256 << 20, False),
        Figure("layers", "layers.*.mlp"): (0.02, True),
    }
    assert second.jobs[0].arguments == ("--model", "g p t")
    assert [job.rank for job in second.jobs] == [0]
    assert not second.jobs[0].with_peers
    assert [limit.figure.kind for limit in second.tolerances] == ["peak_allocated", "peak_reserved"]


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        (
            JOB + 'budgets = { peak_allocated = "72 GX" }',
            "'72 GX' is not a size with a unit",
            'peak_allocated = "72 GiB"',
        ),
        (JOB + 'budgets = { headroom = "150%" }', "150% of the GPU's memory cannot be left", "5%"),
        (JOB + 'budgets = { fitting_draws = "150%" }', "150% of what is drawn cannot fit", "99.9%"),
        (JOB + "budgets = { fitting_draws = 0.999 }", "fitting_draws = 0.999 has no unit", "99.9%"),
        (JOB + 'arguments = "--a \'b"', "arguments: no closing quotation in", "write a list"),
        (JOB + "env = { A = true }", "env maps names to texts, and A is True", "env = {"),
        (JOB + JOB.replace("llama", "Llama"), "two jobs are called 'Llama'", "a name of its own"),
        (JOB + "budgets = { peak_allocated = 72 }", "peak_allocated = 72 has no unit", '"72 GiB"'),
        (JOB + 'budgets = { peak_alocated = "72 GiB" }', "unknown key 'peak_alocated'", "'peak_allocated'?"),
        (JOB + 'budgets = { categories = { activations = "1 GiB" } }', "no category 'activations'", "'activation'?"),
        (JOB + 'budgets = { step_time = "900 GiB" }', "is not a duration with a unit", "900 ms"),
        (JOB + 'budgets = { families = { gem = "9 ms" } }', "there is no family of kernels 'gem'", "gemm"),
        (JOB + 'budgets = { families = { communication = "9 ms" } }', "there is no family of kernels", ""),
        (JOB + 'device = "cuda"\nbudgets = { step_time = "900 GiB" }', "is not a duration with a unit", "900 ms"),
        (JOB + 'max_increase = "1 percent"', "'1 percent' is not a size with a unit", '"1%"'),
        (JOB + 'max_increase = { headroom = "1%" }', "unknown key 'headroom'", ""),
        (JOB + 'bugdets = { peak_allocated = "1 GiB" }', "unknown key 'bugdets'", "'budgets'?"),
        (JOB + "world = 8", "unknown key 'world'", "'world_size'?"),
        (JOB + 'rank = "0"', "unknown key 'rank'", "'ranks'?"),
        (JOB + 'ranks = ["0"]', "ranks is a rank or a list of ranks", ""),
        (JOB + "ranks = [1024]", "rank 1024 does not exist in a world of 1024", ""),
        (JOB + "ranks = [1, 1]", "names a rank twice", ""),
        (JOB + 'steps = "2"', "steps is a number of steps or auto, not '2'", ""),
        (JOB + "arguments = [8]", "arguments is a list of texts", '"8"'),
        (JOB + "match = true", "match needs two ranks or more, and one is to run", "ranks = [0, 1]"),
        (JOB + 'module = "pkg"', "names a script and a module", "one of them"),
        (JOB + 'gpu_memory = "80"', "gpu_memory cannot be read: '80' is not a size", ""),
        (JOB + JOB, "two jobs are called 'llama'", "a name of its own"),
        (JOB.replace("world_size", "world_sise"), "unknown key 'world_sise'", "'world_size'?"),
        (JOB.replace("world_size = 1024", ""), "how many ranks does the job have?", "world_size = 1024"),
        (JOB.replace('"llama"', '"../llama"'), "letters, digits, dots, dashes", ""),
        (JOB.replace('name = "llama"', ""), "a job has a name", ""),
        ('[check]\nbaseline = "x"' + JOB, "unknown key 'baseline'", "'baselines'?"),
        ("[check.jobs.llama]\n", "jobs is a list of tables", "[[check.jobs]]"),
        ("[check]\n", "there are no jobs", "[[check.jobs]]"),
        ("[chek]\n", "has no [check]", "[[check.jobs]]"),
        ("[check\n", "cannot be read: Expected ']'", "expected TOML"),
    ],
)
def test_what_makes_no_sense_gets_one_line_with_its_place(tmp_path: Path, text: str, told: str, hint: str) -> None:
    with pytest.raises(CheckError) as raised:
        read_config(written(tmp_path, text))
    assert told in raised.value.message
    assert "\n" not in raised.value.message
    assert "fakedist.toml" in raised.value.message
    assert hint in raised.value.hint
    assert raised.value.exit_code == 2


def test_the_configuration_is_found_from_below(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    project = written(tmp_path, "[tool.fakedist]\n" + JOB.replace("check", "tool.fakedist.check"), "pyproject.toml")
    written(tmp_path / "a", "[project]\n", "pyproject.toml")  # of something else
    assert find_config(tmp_path / "a/b") == project
    assert read_config(project).jobs[0].name == "llama"
    own = written(tmp_path / "a", JOB)
    assert find_config(tmp_path / "a/b") == own


def test_a_job_or_script_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, JOB)
    assert main(["check", "--config", str(path), "lama"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "fakedist: error: there is no job 'lama' in fakedist.toml",
        "  did you mean 'llama'?",
    ]
    assert main(["check", "--config", str(written(tmp_path, JOB))]) == 2
    error = capsys.readouterr().err
    assert "job 'llama'" in error
    assert "train.py" in error


NET_JOB = '[[check.jobs]]\nname = "net"\nscript = "train.py"\nworld_size = 8\n'


def takes(folder: Path, keys: str, code: str, line: str = "", *, of_job: str = "") -> bool:
    path = folder / "fakedist.toml"
    path.write_text(f"[check]\n{keys}\n{NET_JOB}{of_job}\n")
    config = read_config(path)
    finding = Finding(code, "", "", "", f"{line}:3 (f)" if line else "")
    return config.jobs[0].selection.takes(finding, config.root)


@pytest.mark.parametrize(
    ("keys", "code", "is_taken"),
    [
        ("", "FD101", False),
        ('select = ["FD1"]', "FD101", True),
        ('select = ["FD1"]', "FD203", False),
        ('select = ["FD1", "FD203"]', "FD203", True),
        ('select = ["ALL"]', "FD304", True),
        ('select = ["ALL"]\nignore = ["FD3"]', "FD304", False),
        ('select = ["FD304"]\nignore = ["FD3"]', "FD304", True),
        ('select = ["FD304"]\nignore = ["FD3"]', "FD303", False),
        ('select = ["FD3"]\nignore = ["FD3"]', "FD304", False),
        ('select = ["FD3"]\nignore = ["ALL"]', "FD304", True),
    ],
)
def test_codes_are_selected_by_what_they_begin_with(tmp_path: Path, keys: str, code: str, is_taken: bool) -> None:
    assert takes(tmp_path, keys, code) == is_taken


@pytest.mark.parametrize(
    ("file", "is_taken"),
    [("{}/legacy/train.py", False), ("{}/train.py", True), ("/site-packages/lib/a.py", False), ("", True)],
)
def test_a_files_findings_are_ignored_by_its_path(tmp_path: Path, file: str, is_taken: bool) -> None:
    keys = 'select = ["ALL"]\nper-file-ignores = { "legacy/*" = ["FD1"], "*/site-packages/*" = ["ALL"] }'
    assert takes(tmp_path, keys, "FD101", file.format(tmp_path)) == is_taken
    stars = keys.replace("legacy/*", "**/legacy/**/*.py").replace("*/site", "**/site").replace("s/*", "s/**")
    assert takes(tmp_path, stars, "FD101", file.format(tmp_path)) == is_taken


def test_a_job_has_its_own_selection(tmp_path: Path) -> None:
    assert not takes(tmp_path, 'select = ["FD1"]', "FD101", of_job='select = ["FD2"]')
    assert takes(tmp_path, 'select = ["FD1"]', "FD203", of_job='select = ["FD2"]')
    assert not takes(tmp_path, 'select = ["FD1"]', "FD101", of_job="select = []")
    assert takes(tmp_path, 'select = ["FD1"]\nignore = ["FD101"]', "FD101", of_job="ignore = []")
    ignores = 'select = ["ALL"]\nper-file-ignores = { "*.py" = ["ALL"] }'
    assert takes(tmp_path, ignores, "FD101", "a.py", of_job="per-file-ignores = {}")


@pytest.mark.parametrize("code", ["FD999", "", "fd101", "FD101 "])
def test_a_code_that_does_not_exist_is_refused_with_what_was_meant(tmp_path: Path, code: str) -> None:
    with pytest.raises(CheckError, match=f"there is no rule '{code}'"):
        takes(tmp_path, f'select = ["{code}"]', "FD101")
