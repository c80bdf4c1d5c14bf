import pytest

from fakedist.report.render.html import command, layer_name, signs, source_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-3.00 MiB", "\u22123.00 MiB"),
        ("-12.5%", "\u221212.5%"),
        ("-30.0 µs", "\u221230.0 µs"),
        ("-1.50 MiB at the peak, -1,024 B", "\u22121.50 MiB at the peak, \u22121,024 B"),
        ("2 -> 4", "2 \u2192 4"),
        ("--loss-parallel: the peak", "--loss-parallel: the peak"),
        ("--lr -1 -> -2", "--lr -1 \u2192 -2"),
        ("layers.0-79 s", "layers.0-79 s"),
        ("ranks 0-62:2", "ranks 0-62:2"),
    ],
)
def test_negative_amounts_have_a_minus_sign_and_nothing_else_has(text: str, shown: str) -> None:
    assert signs(text) == shown


@pytest.mark.parametrize(
    ("name", "markup"),
    [
        ("layers.0-79.mlp", 'layers.<wbr><span class="name">0-79.</span><wbr>mlp'),
        ("(Transformer)", "(Transformer)"),
        ("", ""),
        ("a.<b>-c", 'a.<wbr><span class="name">&lt;b&gt;-c</span>'),
        ("x" * 50 + ".<i>", "x" * 50 + ".&lt;i&gt;"),
    ],
)
def test_a_name_breaks_after_its_dots_and_stays_text(name: str, markup: str) -> None:
    assert str(layer_name(name)) == markup


def test_commands_break_between_words_lines_after_folders_and_the_interval_of_a_step_is_lighter() -> None:
    assert str(command("a.py --loss-parallel <x>")) == 'a.py <span class="name">--loss-parallel</span> &lt;x&gt;'
    assert str(command("-" * 50)) == "-" * 50
    assert str(source_line("a/<b>.py:7 (main)")) == "a/<wbr>&lt;b&gt;.py:7 (main)"
