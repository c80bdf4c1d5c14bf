from fakedist.visible import visible, visible_lines


def test_control_characters_are_written_out() -> None:
    assert visible("\x1b[31mred\x07\n\x7f\x9b1m") == "\\x1b[31mred\\x07\\x0a\\x7f\\x9b1m"
    assert visible("\udc9b") == "\\x9b"  # the byte 0x9b of a file name


def test_other_letters_stay() -> None:
    assert visible("größe µs 層 \udce9") == "größe µs 層 \udce9"


def test_a_long_name_is_cut_and_says_how_long_it_was() -> None:
    assert visible("a" * 5_000_000) == "a" * 300 + "... (5,000,000 characters)"


def test_lines_stay_lines() -> None:
    assert visible_lines("a\n\tb\r\x1b") == "a\n\tb\\x0d\\x1b"


def test_what_turns_the_direction_of_text_and_what_ends_lines_is_written_out() -> None:
    assert visible("rm \u202egnp.\u2066\u2028x") == "rm \\u202egnp.\\u2066\\u2028x"
    assert visible_lines("\u2069\n") == "\\u2069\n"
