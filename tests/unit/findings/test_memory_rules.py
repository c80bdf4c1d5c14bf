"""Findings: their pages, comments that ignore them, and rules by hand-made runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pandas as pd
import pytest

from fakedist.cli import main
from fakedist.findings.case import Case
from fakedist.findings.finding_all import is_ignored
from fakedist.findings.memory_rules import _adapted_layers, outliving_a_step
from fakedist.findings.registry import RULES
from fakedist.findings.rule_pages import markdown, page_of
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.rundir.finding import Finding
from tests.unit.analysis.recorded import MIB, HandMade
from tests.unit.report.handmade import built

ROOT = Path(__file__).parents[3]


def test_the_page_has_every_rule_and_is_what_their_docstrings_say() -> None:
    page = ROOT / "docs" / "findings.md"
    assert page.read_text() == markdown(), "python -m fakedist.findings.rule_pages > docs/findings.md"
    assert [code for code in RULES if f"\n## {code}: " not in page.read_text()] == []


@pytest.mark.parametrize("code", RULES)
def test_a_rules_page_says_what_it_sees_and_what_mends_it(code: str) -> None:
    page = page_of(code)
    assert "**Mend**" in page
    assert "he rule " in page or code == "FD116"


def test_explain_prints_a_page_and_names_a_code_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "fd304"]) == 0
    assert capsys.readouterr().out == page_of("FD304")
    assert main(["explain", "FD30"]) == 2
    assert "there is no rule 'FD30'\n  known are: FD301, FD302, FD303, FD304" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("comment", "is_left_out"),
    [
        ("", False),
        ("  # fakedist: ignore", True),
        ("  # fakedist: ignore[FD108]", True),
        ("  # noqa: E501  # fakedist: ignore[FD2, FD108]", True),
        ("  # fakedist: ignore[FD1]", True),
        ("  # fakedist: ignore[FD101]", False),
        ("  # fakedist: ignore[fd108 , FD2]", True),
        ("  # fakedist: ignore[fd101]", False),
        ("  # FakeDist:ignore [ALL] kept on purpose", True),
        ("  # fakedist: ignore[FD101: see #12]", False),
        ("  # fakedist: ignored once", False),
        ("  # fakedist: ignore[]", True),
    ],
)
def test_a_comment_at_the_line_ignores_a_finding(tmp_path: Path, comment: str, is_left_out: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\nlosses.append(loss){comment}\n")
    finding = Finding("FD108", "", "", "", f"{script}:2 (main)")
    assert is_ignored(finding) == is_left_out
    assert not is_ignored(Finding("FD108", "", "", "", f"{script}:1 (main)"))


@pytest.mark.parametrize(("at", "is_left_out"), [(2, True), (3, False), (4, True), (5, True), (1, False), (6, False)])
def test_a_comment_at_the_first_or_last_line_of_a_statement_ignores_its_findings(
    tmp_path: Path, at: int, is_left_out: bool
) -> None:
    lines = [
        "for batch in batches:",
        "    losses.append(",
        "        function(",
        "            batch",
        "        ))",
        "done()",
    ]
    lines[at - 1] += "  # fakedist: ignore[FD108]"
    script = tmp_path / "train.py"
    script.write_text("\n".join(lines))
    assert is_ignored(Finding("FD108", "", "", "", f"{script}:4 (main)")) == is_left_out


def test_a_comment_in_a_file_that_is_not_python_counts_at_its_line_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("%magic\nf(  # fakedist: ignore\n  x)\n")
    assert [is_ignored(Finding("FD108", "", "", "", f"{script}:{line} (main)")) for line in (2, 3)] == [True, False]


def test_a_line_whose_file_is_gone_or_shorter_ignores_nothing(tmp_path: Path) -> None:
    for line in ("", f"{tmp_path / 'gone.py'}:2 (main)", f"{__file__}:99999 (main)", f"{tmp_path}:1 (main)"):
        assert not is_ignored(Finding("FD108", "", "", "", line))


def chunked(*, num_chunks: int, kept: bool, layers_between: bool = False) -> HandMade:
    """Two steps of a model whose loss is computed in chunks of 8 MiB, whose tensors are kept or freed at once."""
    made = HandMade()
    root = made.layer("(Model)", "Model")
    container = made.layer("layers", "ModuleList", root)
    blocks = [made.layer(f"layers.{number}", "Block", container) for number in range(2)]
    line = made.stack(("/job/train.py", 7, "chunk_loss"))
    for step in (1, 2):
        first = last = made.op("forward", step, blocks[0], name="aten.mm.default")
        made.alloc(16 * MIB, MIB)
        for number in range(num_chunks):
            if layers_between:
                last = made.op("forward", step, blocks[1], name="aten.mm.default")
                made.alloc((512 + number) * MIB, MIB // 2)
            last = made.op("forward", step, root, name="aten._log_softmax.default")
            made.alloc((32 + 8 * number) * MIB, 8 * MIB, stack=line)
            if not kept:
                made.free((32 + 8 * number) * MIB, 8 * MIB)
        made.op("backward", step, root, name="aten.mm.default")
        made.region(first, last)
        made.alloc(900 * MIB, MIB)
        made.free(900 * MIB, MIB)
        for number in reversed(range(num_chunks)):
            if kept:
                made.free((32 + 8 * number) * MIB, 8 * MIB)
            if layers_between:
                made.free((512 + number) * MIB, MIB // 2)
        made.free(16 * MIB, MIB)
        made.step(step)
    made.ended()
    return made


def codes(run: Run) -> list[str]:
    assert run.finding_notes == []
    return [finding.code for finding in run.findings]


@pytest.mark.parametrize("num_chunks", [2, 3, 9])
def test_chunks_of_a_loss_that_are_kept_are_found_with_their_bytes(tmp_path: Path, num_chunks: int) -> None:
    run = open_run(built(chunked(num_chunks=num_chunks, kept=True), tmp_path))
    assert "FD101" in codes(run)
    finding = next(finding for finding in run.findings if finding.code == "FD101")
    assert finding.text.startswith(f"{num_chunks} chunks of the loss keep {8 * num_chunks}.00 MiB ")
    assert finding.line == "/job/train.py:7 (chunk_loss)"
    # One chunk stays; its own tensors, and the smallest of what else the peak holds.
    assert finding.gives_low_bytes == finding.gives_high_bytes == 8 * (num_chunks - 1) * MIB


@pytest.mark.parametrize("settings", [{"kept": False}, {"kept": True, "layers_between": True}])
def test_chunks_that_are_freed_and_losses_of_several_forwards_are_no_fault(
    tmp_path: Path, settings: dict[str, bool]
) -> None:
    assert "FD101" not in codes(open_run(built(chunked(num_chunks=4, **settings), tmp_path)))


@pytest.mark.parametrize(
    ("product", "loss"),
    [("aten.mm.default", "aten._log_softmax.default"), ("aten::linear", "aten::cross_entropy"), ("aten::add", "")],
)
def test_copies_of_logits_are_found_by_the_names_of_runs_and_of_snapshots(
    tmp_path: Path, product: str, loss: str
) -> None:
    made = HandMade()
    root = made.layer("(Model)", "Model")
    for step in (1, 2):
        held = [(1024 * MIB, 32 * MIB, product), (2048 * MIB, 64 * MIB, "aten::to"), (3072 * MIB, 64 * MIB, loss)]
        for address, size, name in held:
            made.op("forward", step, root, name=name or "aten::add")
            made.alloc(address, size)
        made.op("backward", step, root, name="aten.mm.default")
        made.alloc(4096 * MIB, 64 * MIB)
        for address, size, _ in [*held, (4096 * MIB, 64 * MIB, "")]:
            made.free(address, size)
        made.step(step)
    made.ended()
    assert ("FD102" in codes(open_run(built(made, tmp_path)))) == bool(loss)


def layers_of(*rows: tuple[int, int, int, int]) -> pd.DataFrame:
    """Layers by parent, and the bytes of parameters, gradients and optimizer state; the first row is none."""
    names = ["parent", "most_parameter_bytes", "most_gradient_bytes", "most_optimizer_state_bytes"]
    return pd.DataFrame([(-1, 0, 0, 0), *rows], columns=names)


def test_a_frozen_weight_with_small_trained_ones_next_to_it_is_an_adapted_layer() -> None:
    root, block = (0, 0, 0, 0), (1, 0, 0, 0)
    linear, base, down, up = (2, 0, 0, 0), (3, 4096, 0, 0), (3, 64, 64, 128), (3, 64, 64, 128)
    assert _adapted_layers(layers_of(root, block, linear, base, down, up)) == [3]
    # Weights of its own: a frozen one and its adapter's.
    assert _adapted_layers(layers_of(root, block, (2, 4096 + 128, 128, 256))) == [3]


def test_layers_that_are_trained_whole_and_norms_between_frozen_ones_are_not_adapted() -> None:
    root, block = (0, 0, 0, 0), (1, 0, 0, 0)
    assert _adapted_layers(layers_of(root, block, (2, 4096, 4096, 8192), (2, 4096, 4096, 8192))) == []
    assert _adapted_layers(layers_of(root, block, (2, 4096, 0, 0), (2, 4096, 0, 0), (2, 64, 64, 128))) == []
    assert _adapted_layers(layers_of(root, block, (2, 4096, 0, 0), (2, 4096, 0, 0))) == []


@pytest.mark.parametrize("threads", [[0, 1], [0, 0]])
def test_steps_of_several_threads_are_not_taken_for_one_after_another(threads: list[int]) -> None:
    launches = pd.DataFrame({"thread": threads, "phase": "forward"})
    case = SimpleNamespace(
        evidence=None, has=lambda name: True, table=lambda name: launches, in_phase=lambda table, phase: slice(None)
    )
    if len(set(threads)) > 1:
        assert not list(outliving_a_step(cast(Case, case)))
    else:
        with pytest.raises(AttributeError, match="blocks"):  # it looks at the blocks
            list(outliving_a_step(cast(Case, case)))
