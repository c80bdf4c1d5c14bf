from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.errors import FakedistError, SweepError
from fakedist.options import JobProgram
from fakedist.sweep.command import Texts
from fakedist.sweep.plan import CommandLineSettings, RankChoice, SweepPlan, sweep_of_command, sweep_of_file
from fakedist.sweep.sheets import ranks_text
from fakedist.sweep.space import all_points

SWEEP = """
script = "train.py"
arguments = "--tp {tp} --pp {pp} {rec}"
world_size = 64
ranks = "stages:5"
keep = "none"
headroom = "8%"
context = "600MiB"
tokens_per_step = "4096 * pp"
where = "tp * pp <= 8"

[axes]
tp = [1, 2, 4, 8]
pp = { from = 1, to = 8, factor = 2 }
rec = { named = { none = [], full = ["--recompute", "full"] } }
"""


def read(tmp_path: Path, text: str, given: CommandLineSettings | None = None) -> SweepPlan:
    (tmp_path / "sweep.toml").write_text(text)
    return sweep_of_file(tmp_path / "sweep.toml", given or CommandLineSettings())


def test_a_sweep_file_is_read(tmp_path: Path) -> None:
    plan = read(tmp_path, SWEEP)
    assert plan.command.program == JobProgram(str(tmp_path / "train.py"), ("--tp", "{tp}", "--pp", "{pp}", "{rec}"))
    assert plan.space.constants == {"world_size": 64}
    assert len(all_points(plan.space)) == 20
    assert plan.ranks == RankChoice("stages", num_best=5)
    assert (plan.keeps_runs, plan.headroom, plan.context_bytes) == (False, 0.08, 600 << 20)
    assert plan.tokens is not None


@pytest.mark.parametrize(
    ("plain", "choice", "text"),
    [
        ('"ends"', RankChoice(), "rank 0, then the last stage of its pipeline"),
        ('"stages"', RankChoice("stages"), "then every stage of the best 10"),
        ('"stages:5"', RankChoice("stages", num_best=5), "then every stage of the best 5"),
        ('"stages:all"', RankChoice("stages", num_best=None), "then every stage of all points"),
        ("5", RankChoice("listed", (5,)), "5"),
        ('"3,0-1"', RankChoice("listed", (3, 0, 1)), "3, 0, 1"),
        ("[4, 0, 4]", RankChoice("listed", (4, 0)), "4, 0"),
    ],
)
def test_ranks_are_stages_or_numbers_and_are_said_in_words(
    tmp_path: Path, plain: str, choice: RankChoice, text: str
) -> None:
    found = read(tmp_path, SWEEP.replace('"stages:5"', plain)).ranks
    assert found == choice
    assert ranks_text(found).endswith(text)


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    given = CommandLineSettings(
        axes=["tp=1"],
        conditions=["pp > 1"],
        options={"world_size": Texts(("8",))},
        settings={"keep": "all", "ranks": None},
    )
    plan = read(tmp_path, SWEEP, given)
    assert plan.space.axes[0].values == (1,)
    assert len(all_points(plan.space)) == 6
    assert plan.space.constants == {"world_size": 8}
    assert (plan.keeps_runs, plan.ranks.num_best) == (True, 5)


def test_values_of_the_command_line_stand_for_the_arguments_of_the_file(tmp_path: Path) -> None:
    plan = read(tmp_path, SWEEP, CommandLineSettings(axes=["rec=full", "tp=1", "pp=1"]))
    (point,) = all_points(plan.space)
    assert plan.command.at(plan.space, point).job.arguments[-2:] == ("--recompute", "full")
    with pytest.raises(SweepError, match="axis rec has no ful"):
        read(tmp_path, SWEEP, CommandLineSettings(axes=["rec=ful"]))


def test_a_command_line_alone_is_a_sweep() -> None:
    given = CommandLineSettings(
        ["tp=1,2"], derived=["dp=8 // tp"], prices=["gpus-per-node=4"], options={"world_size": Texts(("8",))}
    )
    plan = sweep_of_command(JobProgram("train.py", ("{tp}", "{dp}")), given)
    assert (plan.name, plan.ranks) == ("train", RankChoice())
    run = plan.command.at(plan.space, all_points(plan.space)[1])
    assert run.job.arguments == ("2", "4")
    assert run.pricing.gpus_per_node == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"train.py"', "3", "script is a text"),
        ('script = "train.py"', "", "names neither a script nor a module"),
        ("world_size", "word_size", "unknown key 'word_size'"),
        ('"stages:5"', "true", "ranks is ends"),
        ('"stages:5"', "[0, true]", "ranks is ends"),
        ('"stages:5"', "[]", "ranks is ends"),
        ("stages:5", "stage", "ranks is ends, stages or a list of ranks"),
        ('keep = "none"', 'keep = "best:3"', "keep is all or none"),
        ('"8%"', "8", "headroom is a share"),
        ('"600MiB"', '"600"', "context is the memory"),
        ("4096 * pp", "4096 * x", "uses x, which is not an axis"),
        ("tp * pp <= 8", "tp * pp <=", "is not an expression"),
        ("--tp {tp}", "--tp '{tp}", "no closing quotation"),
        ("[axes]", "[axes", "is not TOML"),
        ("[axes]", "trials = 0\n[axes]", "trials is a whole number of 1 or more"),
        ("[axes]", 'sampler = "tpe"\n[axes]', "sampler was removed: trials draws points from a seed"),
        ("factor = 2", "factor = 2, monotone = true", "monotone was removed: every point runs"),
        ("[axes]", "[files]\nc = 1\n[axes]", "c is a table"),
        ("[axes]", "[price]\nx = 1\n[axes]", "unknown key 'x'"),
        ("[axes]", 'device = "cuda"\n[axes]', "unknown key 'device'"),
    ],
)
def test_a_file_that_is_not_valid_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SWEEP
    with pytest.raises(SweepError, match="cannot be read: No such file"):
        sweep_of_file(tmp_path / "sweep.toml", CommandLineSettings())
    with pytest.raises(SweepError, match=message):
        read(tmp_path, SWEEP.replace(old, new))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (CommandLineSettings(["tp=1"], prices=["gpus=4"]), "--price has no gpus"),
        (CommandLineSettings(["tp=1"], derived=["dp"]), "--let"),
        (CommandLineSettings(options={"world_size": Texts(("8",))}, settings={"trials": 3}), "there is no axis"),
    ],
)
def test_a_command_line_that_is_no_sweep_is_refused(given: CommandLineSettings, message: str) -> None:
    with pytest.raises(SweepError, match=message):
        sweep_of_command(JobProgram("train.py"), given)


def test_a_price_may_follow_an_axis() -> None:
    given = CommandLineSettings(["n=4,8"], prices=["gpus-per-node={n}"], options={"world_size": Texts(("8",))})
    plan = sweep_of_command(JobProgram("train.py", ("{n}",)), given)
    points = all_points(plan.space)
    assert [plan.command.at(plan.space, point).pricing.gpus_per_node for point in points] == [4, 8]


def test_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    touch = f"touch {tmp_path}/ran"
    texts = {"where": f"__import__('os').system('{touch}')", "arguments": f"$({touch}) `{touch}` {{tp}} ; {touch}"}
    for key, text in texts.items():
        sweep = f'script = "train.py"\nworld_size = 8\n{key} = """{text}"""\n[axes]\ntp = ["$({touch})", "`{touch}`"]\n'
        try:
            plan = read(tmp_path, sweep)
            for point in all_points(plan.space):
                plan.command.at(plan.space, point)
        except FakedistError:
            pass
    assert not (tmp_path / "ran").exists()
