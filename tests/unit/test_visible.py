from fakedist.visible import visible, visible_lines


def test_control_characters_and_what_turns_the_direction_of_text_are_written_out_and_other_letters_stay() -> None:
    assert visible("\x1b[31mred\x07\n\x7f\x9b1m") == "\\x1b[31mred\\x07\\x0a\\x7f\\x9b1m"
    assert visible("\udc9b") == "\\x9b"  # the byte 0x9b of a file name
    assert visible("rm \u202egnp.\u2066\u2028x") == "rm \\u202egnp.\\u2066\\u2028x"
    assert visible("größe µs 層 \udce9") == "größe µs 層 \udce9"


def test_lines_stay_lines_and_a_long_name_is_cut_and_says_how_long_it_was() -> None:
    assert visible_lines("a\n\tb\r\x1b\u2069\n") == "a\n\tb\\x0d\\x1b\\u2069\n"
    assert visible("a" * 5_000_000) == "a" * 300 + "... (5,000,000 characters)"
