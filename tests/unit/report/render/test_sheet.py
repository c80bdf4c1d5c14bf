import io

import pytest
from rich.console import Console
from rich.text import Text

from fakedist.report.content.report_blocks import KEY, SheetColumn
from fakedist.report.render.terminal import folded, print_items, print_table, print_words

COLUMNS = [
    SheetColumn("layer", ["mlp", "attention"], is_text=True),
    SheetColumn("total", ["1.00 GiB", "12.00 MiB"]),
    SheetColumn("grads", ["-", "2.00 MiB"], rank=1),
    SheetColumn("own", ["3 B", "0 B"], rank=2),
]


def printed(width: int, columns: list[SheetColumn] = COLUMNS) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    print_table(console, "By layer", columns)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_text_stands_left_and_figures_right() -> None:
    assert printed(80) == [
        "",
        "By layer",
        "layer          total     grads  own",
        "mlp         1.00 GiB         -  3 B",
        "attention  12.00 MiB  2.00 MiB  0 B",
    ]


@pytest.mark.parametrize(
    ("width", "left_out"), [(35, []), (34, ["own"]), (30, ["own"]), (29, ["grads", "own"]), (20, ["grads", "own"])]
)
def test_columns_without_room_are_left_out_by_rank_and_named(width: int, left_out: list[str]) -> None:
    lines = printed(width)
    assert all(len(line) <= width for line in lines)
    assert [name for name in ("grads", "own") if name not in lines[2]] == left_out
    told = " ".join(line.strip() for line in lines[5:])
    assert told == (
        f"columns not shown: {', '.join(left_out)} (a wider terminal or --json has them)" if left_out else ""
    )


WIDE = [
    SheetColumn("layer", ["layers.0-79.attention.wq x80"], is_text=True),
    SheetColumn("params", ["20.00 MiB"]),
    SheetColumn("total", ["60.04 MiB"], rank=KEY),
    SheetColumn("most", ["288.75 MiB"]),
]


def test_on_a_narrow_terminal_the_key_column_stays_and_names_fold_at_their_dots() -> None:
    assert printed(40, WIDE)[2:] == [
        "layer                  params      total",
        "layers.0-79.        20.00 MiB  60.04 MiB",
        "attention.wq x80",
        "  columns not shown: most (a wider",
        "  terminal or --json has them)",
    ]
    assert printed(30, WIDE)[2].split() == ["layer", "total"]


def test_headings_fold_before_a_column_is_left_out() -> None:
    columns = [SheetColumn("step", ["1"]), SheetColumn("allocated at end", ["1.00 GiB"], rank=2)]
    assert printed(22, columns)[2:] == ["step  allocated at end", "   1          1.00 GiB"]
    assert printed(15, columns)[2:] == ["      allocated", "step     at end", "   1   1.00 GiB"]
    assert printed(14, columns)[2:4] == ["step", "   1"]


def test_no_figure_is_ever_cut() -> None:
    for width in range(8, 60):
        lines = printed(width, WIDE)[2:]
        assert "60.04 MiB" in " ".join(lines)
        assert "…" not in " ".join(lines)


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("a line of words", 8, ["a line", "of words"]),
        ("examples/llama_fsdp2.py:274 (cross_entropy)", 20, ["examples/llama_", "fsdp2.py:274", "(cross_entropy)"]),
        ("layers.0-79.mlp", 12, ["layers.0-79.", "mlp"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("short", 9, ["short"]),
        ("層層層 a", 4, ["層層", "層 a"]),
    ],
)
def test_text_folds_at_blanks_then_within_names(text: str, width: int, lines: list[str]) -> None:
    assert folded(text, width).split("\n") == lines


def test_text_is_folded_and_figures_stay_whole_where_nothing_more_can_be_left_out() -> None:
    assert printed(16)[2:] == [
        "layer      total",
        "mlp     1.00 GiB",
        "atten  12.00 MiB",
        "tion",
        "  columns not",
        "  shown: grads,",
        "  own (a wider",
        "  terminal or",
        "  --json has",
        "  them)",
    ]


@pytest.mark.parametrize("width", range(20, 60, 3))
def test_a_number_and_its_unit_stay_on_one_line(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    sentence = "then needs 49.62 to 50.49 GiB: it takes 12.1 s of copies, at most 1.47 ms of them at once"
    print_words(console, Text(sentence), 0)
    print_items(console, [sentence])
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if line.lstrip().startswith(("GiB", "s ", "ms"))] == []
    assert " ".join(" ".join(lines).split()) == f"{sentence} - {sentence}"
