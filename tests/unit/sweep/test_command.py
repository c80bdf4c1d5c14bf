from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from fakedist.errors import SweepError
from fakedist.options import Door, JobProgram
from fakedist.section import Section
from fakedist.sweep.command import (
    Filling,
    PointFile,
    PointRun,
    PricedFor,
    SweptCommand,
    Texts,
    placeholders_of,
    read_plain,
    read_point_file,
    toml_text,
)
from fakedist.sweep.space import Axis, Expression, Point, Space, all_points, axis_of_text


def swept(
    *arguments: str, files: tuple[PointFile, ...] = (), price: dict[str, object] | None = None, **options: object
) -> SweptCommand:
    return SweptCommand(JobProgram("train.py", arguments), {"world_size": 8, **options}, files, price or {})


def runs(one: SweptCommand, *axes: str) -> list[PointRun]:
    space = Space(tuple(map(axis_of_text, axes)))
    one.check(space)
    return [one.at(space, point) for point in all_points(space)]


def test_a_point_fills_arguments_environment_and_options() -> None:
    one = swept("--tp", "{tp}", world_size="{n}", env={"TP": "{tp}", "ON": True}, gpu_memory="{n}GiB")
    (run,) = runs(one, "tp=4", "n=16")
    assert run.job.arguments == ("--tp", "4")
    assert run.job.environment == (("ON", "true"), ("TP", "4"))
    assert (run.job.world_size, run.job.gpu_memory_bytes) == (16, 16 << 30)


def test_what_only_prices_makes_no_other_run() -> None:
    one = swept("{tp}", fabric="{fabric}", gpu_power="{watts}", price={"gpus_per_node": "{n}"})
    found = runs(one, "tp=1", "fabric=p5-efa,dgx-h100-ndr", "watts=400,700", "n=4,8")
    assert len(found) == 8
    assert len({run.job for run in found}) == 1
    assert found[0].pricing == PricedFor(fabric="p5-efa", power_watts=400, gpus_per_node=4)


def test_what_every_point_has_is_part_of_the_run() -> None:
    (run,) = runs(swept("{tp}", fabric="p5-efa"), "tp=1")
    assert (run.job.fabric, run.pricing) == ("p5-efa", PricedFor())


def test_a_gpu_that_differs_in_its_clocks_alone_is_priced(tmp_path: Path) -> None:
    slow, small = tmp_path / "slow.toml", tmp_path / "small.toml"
    slow.write_text('like = "h100-80g"\nwatts = 400\nclock_mhz = 1000\nmemory_gb_s = 2000\n')
    small.write_text('like = "h100-80g"\nmemory = "40GiB"\n')
    found = runs(swept("{x}", gpu="{gpu}"), "x=1", f"gpu=h100,h200,{slow},{small}")
    assert [run.job.gpu for run in found] == ["h100", "h200", "h100", str(small)]
    assert [run.pricing.gpu for run in found] == [None, None, str(slow), None]


def test_a_placeholder_that_is_unknown_and_an_axis_or_a_file_that_nothing_uses_are_refused() -> None:
    for one, where in (
        (swept("--tp", "{tpp}"), "the arguments"),
        (swept("{tp}", env={"X": "{tpp}"}), "the option env"),
        (swept("{tp}", price={"gpus_per_node": "{tpp}"}), "price gpus_per_node"),
    ):
        with pytest.raises(SweepError, match=f"unknown placeholder {{tpp}} in {where}") as raised:
            runs(one, "tp=1")
        assert "did you mean 'tp'?" in raised.value.hint
    with pytest.raises(SweepError, match="axis pp is used nowhere"):
        runs(swept("{tp}"), "tp=1", "pp=1,2")
    with pytest.raises(SweepError, match="the file config is used nowhere"):
        runs(swept("{tp}", files=(PointFile("config", "c.json", {}, ()),)), "tp=1")


def test_an_axis_that_only_a_derived_value_uses_is_used() -> None:
    space = Space((Axis("tp", (1, 2)),), (("dp", Expression("8 // tp", "let:")),))
    one = swept("{dp}")
    one.check(space)
    assert [one.at(space, point).job.arguments for point in all_points(space)] == [("8",), ("4",)]


def test_a_file_stands_for_its_content_until_it_has_a_place(tmp_path: Path) -> None:
    file = PointFile("config", "c.json", {}, ((("tp",), "{tp}"),))
    one, two = runs(swept("--config={config}", files=(file,), env={"C": "{config}"}), "tp=1,2")
    assert one.job.arguments != two.job.arguments
    one.write_files(tmp_path / "a")
    assert one.placed(tmp_path / "a").arguments == (f"--config={tmp_path}/a/c.json",)
    assert one.placed(tmp_path / "a").environment == (("C", f"{tmp_path}/a/c.json"),)
    assert (tmp_path / "a" / "c.json").read_text() == '{\n  "tp": 1\n}\n'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": "{n}"}, r"at n=x: world_size is a whole number, not 'x'"),
        ({"gpu": "{n}"}, "at n=x: fakedist does not know the GPU 'x'"),
        ({"fabric": 3, "steps": "{n}"}, "at n=x: "),
    ],
)
def test_a_value_that_an_option_refuses_names_the_point(options: dict[str, object], message: str) -> None:
    with pytest.raises(SweepError, match=message):
        runs(swept("{n}", **options), "n=x")


def test_the_command_line_gives_texts() -> None:
    space = Space((Axis("n", (8, 16)),))
    options = {"world_size": Texts(("{n}",)), "env": Texts(("A={n}", "B=1"))}
    one = SweptCommand(JobProgram("train.py"), options, door=Door.COMMAND_LINE)
    found = one.at(space, Point((("n", 16),)))
    assert found.job.world_size == 16
    assert found.job.environment == (("A", "16"), ("B", "1"))


FILLING = Filling(
    {"tp": 4, "lr": 0.5, "on": True, "rec": "full", "one": "one", "none": "none"},
    {"rec": ("--recompute", "full"), "one": ("--x",), "none": ()},
)


@pytest.mark.parametrize("text", ['{"a": {"b": 1}}', "{}", "{0}", "{ tp }", "${x", "{a-b}"])
def test_placeholders_become_values_and_other_braces_are_left_as_they_are(text: str) -> None:
    assert FILLING.text("--tp={tp},lr={lr},on={on},{{tp}}") == "--tp=4,lr=0.5,on=true,{tp}"
    assert FILLING.text(text) == text
    assert list(placeholders_of(text)) == []


def test_a_text_that_is_one_placeholder_keeps_its_type() -> None:
    assert FILLING.plain({"a": "{tp}", "b": ["{on}", "x{tp}"], "c": 3}) == {"a": 4, "b": [True, "x4"], "c": 3}
    assert FILLING.plain(Texts(("{tp}", "a={lr}"))) == Texts(("4", "a=0.5"))


def test_an_argument_may_become_several_or_none() -> None:
    assert FILLING.command(["--tp", "{tp}", "{rec}", "{none}", "{one}", "y{one}"]) == (
        *("--tp", "4", "--recompute", "full", "--x"),
        "y--x",
    )
    with pytest.raises(SweepError, match="stands for 2 arguments"):
        FILLING.text("x={rec}")


def test_placeholders_are_found_everywhere() -> None:
    template = {"a": ["{tp}", {"b": "x{pp}{{cp}}"}], "c": Texts(("{ep}",)), "d": 1}
    assert list(placeholders_of(template)) == ["tp", "pp", "ep"]


FILE_FILLING = Filling({"tp": 4, "name": 'a "b"\n'}, {})
BASE = {"model": {"name": "llama", "layers": [1, {"x": 2}]}, "steps": 10}


def made(file_name: str, changes: dict[str, object], content: dict[str, object] | None = None) -> str:
    keys = tuple((tuple(key.split(".")), value) for key, value in changes.items())
    return PointFile("config", file_name, BASE if content is None else content, keys).text(FILE_FILLING)


@pytest.mark.parametrize(
    ("file_name", "read"), [("c.toml", tomllib.loads), ("c.json", json.loads), ("c.yaml", yaml.safe_load)]
)
def test_a_file_has_its_values_replaced(file_name: str, read: object) -> None:
    assert callable(read)
    text = made(file_name, {"model.tp": "{tp}", "model.layers.1.x": "n{tp}", "new.deep.key": "{name}", "steps": 2.5})
    assert read(text) == {
        "model": {"name": "llama", "layers": [1, {"x": "n4"}], "tp": 4},
        "steps": 2.5,
        "new": {"deep": {"key": 'a "b"\n'}},
    }
    assert BASE == {"model": {"name": "llama", "layers": [1, {"x": 2}]}, "steps": 10}


def test_toml_of_any_plain_values_reads_back() -> None:
    content = {
        "a b": 1,
        "": "empty",
        "ü": "é\u0001\x7f\\",
        "f": [1e300, -0.0, float("inf")],
        "t": {"u": {"v": True}, "w": {}},
        "list": [{"x": [[]]}, {}],
    }
    assert tomllib.loads(toml_text(content)) == content


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps.x": 1}, "is 10, not a table"),
        ({"model.layers.7": 1}, "is a list of 2"),
        ({"model.layers.x": 1}, "list"),
    ],
)
def test_a_place_that_is_no_table_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SweepError, match=message):
        made("c.toml", changes)


def test_a_value_without_a_form_is_refused() -> None:
    with pytest.raises(SweepError, match="has no form in TOML"):
        made("c.toml", {}, {"a": None})
    with pytest.raises(SweepError, match="cannot be written"):
        made("c.json", {}, {"a": float("nan")})


def test_a_yaml_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(f"a: !!python/object/apply:os.system ['touch {tmp_path}/ran']\n")
    with pytest.raises(SweepError, match="is not YAML"):
        read_plain(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("b.toml", "a = ", "is not TOML"),
        ("b.json", "[1]", "is not a table"),
        ("b.yaml", "a: [", "is not YAML"),
        ("b.json", "[" * 100_000, "is not JSON"),
        ("b.json", None, "cannot be read"),
    ],
)
def test_a_base_that_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SweepError, match=message):
        read_plain(tmp_path / name)


def test_a_file_is_written_into_the_points_own_directory_and_needs_a_known_ending(tmp_path: Path) -> None:
    def named(name: str) -> str:
        section = Section("sweep.toml", {"name": name, "set": {"a": 1}}, SweepError)
        return read_point_file("config", section, tmp_path).file_name

    for name in ("../../evil.toml", "/etc/evil.toml", "a/b.toml"):
        assert "/" not in named(name)
    with pytest.raises(SweepError, match="has an ending of"):
        named("run.sh")
