"""The page in a real browser: what a reader does with it. Skipped where Chromium or Playwright is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakedist.analysis.building import build_tables
from fakedist.report.page.run_page import write_page
from fakedist.results.opening import open_run
from fakedist.units import format_bytes, format_us
from tests.clients.browser import Reader, serious_faults
from tests.unit.analysis.recorded import MIB, HandMade, new_run, wrote_nothing
from tests.unit.analysis.times.times_by_hand import kernel, record
from tests.unit.report import handmade

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = handmade.timed(tmp_path_factory.mktemp("runs") / "run")
    write_page(open_run(run), run / "report.html")
    return run / "report.html"


def first_column(page: Any, table: str) -> list[str]:
    rows = page.locator(f"#{table} tbody tr:not(.under)").all()
    return [row.locator("th, td").first.inner_text().split("\n")[0].strip() for row in rows if row.is_visible()]


def test_a_column_sorts_down_up_and_back(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    before = first_column(page, "calls")
    assert before == ["tp", "default_pg"]
    heading = page.locator("#calls th", has_text="ranks")
    heading.locator("button").click()
    assert (heading.get_attribute("aria-sort"), first_column(page, "calls")) == ("descending", ["default_pg", "tp"])
    heading.locator("button").press("Enter")
    assert (heading.get_attribute("aria-sort"), first_column(page, "calls")) == ("ascending", ["tp", "default_pg"])
    heading.locator("button").press("Enter")
    assert (heading.get_attribute("aria-sort"), first_column(page, "calls")) == (None, before)


def test_a_filter_keeps_the_rows_that_say_it(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    page.get_by_label("filter layers").fill("MLP")
    assert first_column(page, "layer-table") == ["layers.0-2.mlp x3"]
    assert page.locator("#layers .told").inner_text() == "1 of 6 rows"
    page.get_by_label("filter layers").fill("")
    assert len(first_column(page, "layer-table")) > 3


def test_a_folded_layer_opens_to_each_of_them(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    row = page.locator("#layer-table tr", has=page.locator("span.label", has_text="layers.0-2.mlp"))
    row.get_by_role("button").click()
    each = page.locator("#layer-table tr.repeat")
    assert [line.locator("th").inner_text() for line in each.all()] == [f"layers.{at}.mlp" for at in range(3)]
    layers = open_run(written.parent).table("layers")
    wanted = layers[layers["name"].str.endswith(".mlp")]["peak_total_bytes"]
    shown = [line.locator("td").nth(-3).inner_text() for line in each.all()]
    assert shown == [format_bytes(bytes_) for bytes_ in wanted]
    row.get_by_role("button").click()
    assert each.count() == 0


def test_a_block_leads_to_its_line_and_to_the_timeline(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    row = page.locator("#blocks tr", has_text="addmm.default").first
    row.get_by_role("button", name="stack").click()
    assert page.locator("#blocks li.own:visible").inner_text() == "model.py:12 (forward)"
    row.get_by_role("button", name="show").click()
    pinned = page.locator(".pinned").inner_text()
    assert "8.00 MiB activation" in pinned
    assert "model.py:12 (forward)" in pinned


def test_the_peak_of_the_drawing_is_the_peak(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    page.get_by_role("button", name="the peak").click()
    peak = open_run(written.parent).summary.peak_allocated_bytes
    assert page.locator(".pinned").inner_text().startswith(format_bytes(peak))
    assert page.evaluate("fakedist.plot.timeline.peak.bytes") == peak


def test_every_moment_of_the_drawing_is_the_allocators(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    drawn = page.evaluate(
        """() => { const line = fakedist.plot.timeline, found = [];
        for (let move = 0; move < line.numMoves; move += 1) found.push(line.state(move).reduce((a, b) => a + b, 0));
        return found; }"""
    )
    events = open_run(written.parent).table("events")
    assert drawn == events[events["action"].isin(("alloc", "free_requested"))]["allocated_bytes"].tolist()


def test_any_stretch_knows_its_most_and_its_least(reader: Reader, tmp_path: Path) -> None:
    made = HandMade()
    for number in range(700):
        made.op("forward", 1)
        made.alloc(number % 50 * 4 * MIB, 512 * (1 + number * 37 % 1_000))
        if number % 50 >= 25:
            made.free((number % 50 - 25) * 4 * MIB, 512)
        if number % 50 == 49:
            for at in range(25, 50):
                made.free(at * 4 * MIB, 512)
    run = made.write(new_run(tmp_path / "run"))
    build_tables(run)
    write_page(open_run(run), run / "report.html")
    page = reader.open(run / "report.html")
    wrong = page.evaluate(
        """() => { const line = fakedist.plot.timeline, totals = [];
        for (let m = 0; m < line.numMoves; m += 1) totals.push(line.state(m).reduce((a, b) => a + b, 0));
        const wrong = [];
        for (let k = 0; k < 2000; k += 1) {
          const from = (k * 7919) % (line.numMoves - 1), to = from + 1 + (k * 104729) % (line.numMoves - from);
          const found = line.range(from, to), part = totals.slice(from, to);
          const most = Math.max(...part), least = Math.min(...part);
          if (found.most !== most || found.least !== least || totals[found.where] !== most) wrong.push([from, to]);
        }
        return wrong; }"""
    )
    assert wrong == []
    assert page.evaluate("fakedist.plot.timeline.levels.length") > 1


def test_what_is_pointed_at_is_the_block_that_lies_there(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    run = open_run(written.parent)
    blocks = run.table("blocks")
    alive = blocks[blocks["at_peak"] & (blocks["category"] == "parameter")]
    assert len(alive) == 4
    floors = (alive["bytes"].cumsum() - alive["bytes"]).tolist()
    heights = [floor + at for floor, bytes_ in zip(floors, alive["bytes"], strict=True) for at in (0, int(bytes_) - 1)]
    found = page.evaluate(
        """(heights) => { const { timeline } = fakedist.plot, of = timeline.categories.indexOf('parameter');
        return heights.map((height) => timeline.blockAt(timeline.peak.move, of, height).block); }""",
        [*heights, int(alive["bytes"].sum())],
    )
    assert found == [int(number) for number in alive.index for _ in range(2)] + [-1]


def test_the_drawing_zooms_with_mouse_and_keys(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    canvas = page.locator("canvas.main")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    whole = page.evaluate("fakedist.plot.view")
    page.mouse.move(box["x"] + 300, box["y"] + 200)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, box["y"] + 200)
    page.mouse.up()
    zoomed = page.evaluate("fakedist.plot.view")
    assert zoomed[1] - zoomed[0] < (whole[1] - whole[0]) / 2
    canvas.press("0")
    assert page.evaluate("fakedist.plot.view") == whole
    canvas.press("+")
    half = page.evaluate("fakedist.plot.view")
    assert half[1] - half[0] == (whole[1] - whole[0]) / 2
    canvas.dblclick()
    assert page.evaluate("fakedist.plot.view") == whole
    page.mouse.move(box["x"] + 400, box["y"] + 350)
    assert "allocated" in page.locator("#note").inner_text()


def test_fingers_tap_drag_and_stretch(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    page.locator("canvas.main").scroll_into_view_if_needed()
    fingers = """(steps) => {
      const canvas = document.querySelector('canvas.main'), box = canvas.getBoundingClientRect();
      for (const [kind, finger, x] of steps) canvas.dispatchEvent(new PointerEvent(`pointer${kind}`, {
        pointerId: finger, pointerType: 'touch', clientX: box.left + x, clientY: box.top + 340, bubbles: true }));
      return fakedist.plot.view;
    }"""
    whole = page.evaluate("fakedist.plot.view")
    assert page.evaluate(fingers, [["down", 1, 500], ["up", 1, 500]]) == whole
    assert "block" in page.locator(".pinned").inner_text()
    near = page.evaluate(
        fingers, [["down", 1, 400], ["down", 2, 500], ["move", 2, 700], ["up", 1, 400], ["up", 2, 700]]
    )
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 3)
    on = page.evaluate(fingers, [["down", 1, 500], ["move", 1, 400], ["up", 1, 400]])
    assert on[0] > near[0]
    assert on[1] - on[0] == pytest.approx(near[1] - near[0])


def test_the_picture_opens_a_layer_and_goes_back(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    picture = page.locator("#picture")
    picture.get_by_role("button", name="icicle").click()
    assert picture.locator("rect").count() > 3
    picture.get_by_label("open a layer below").select_option(index=1)
    assert "(Transformer)" in picture.locator(".path b").inner_text()
    picture.locator(".path button").first.click()
    assert picture.locator(".path b").inner_text().startswith("the peak")


def test_figures_are_rounded_as_in_python(reader: Reader, written: Path) -> None:
    sizes = [0, 1, 1023, 1024, 1_152, 2_181_038_080, 2_281_701_376, 15_197_585_920, (1 << 40) * 1_234 + (1 << 37)]
    sizes += [at * 135_168 + 5_120 for at in range(300)]
    page = reader.open(written)
    assert page.evaluate("(sizes) => sizes.map(bytesText)", sizes) == [format_bytes(size) for size in sizes]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(reader: Reader, written: Path, scheme: Any, width: int) -> None:
    page = reader.open(written)
    page.set_viewport_size({"width": width, "height": 900})
    told = serious_faults(page, scheme)
    page.set_viewport_size({"width": 1280, "height": 900})
    if told is None:
        pytest.skip("no axe-core: pip install 'fakedist[browser]'")
    assert told == []


def test_it_prints(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    paper = page.pdf(format="A4")
    assert paper.startswith(b"%PDF")
    page.emulate_media(media="print")
    assert not page.locator("header.bar").is_visible()
    page.emulate_media(media="screen")


@pytest.mark.parametrize("width", [360, 720])
def test_no_screen_is_too_narrow(reader: Reader, written: Path, width: int) -> None:
    assert reader.width_on(written, width) <= width


HOSTILE = ("<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "🔥</script><script>alert(2)", "y" * 10_000)


def test_hostile_names_are_text_everywhere(reader: Reader, tmp_path: Path) -> None:
    made = HandMade()
    root = made.layer(HOSTILE[0], HOSTILE[1])
    layers = [made.layer(name, name, root) for name in HOSTILE[1:]]
    for number, (name, layer) in enumerate(zip(HOSTILE, [root, *layers], strict=True)):
        stack = made.stack((f"/job/{name}.py", 1, name))
        made.op("forward", 1, layer, name=name)
        made.alloc(number * 64 * MIB, 32 * MIB, stack=stack)
    made.record("groups", rows=[(0, HOSTILE[0], HOSTILE[2], (0, 1), 0, 0, HOSTILE[1])])
    made.record("calls", rows=[(0, HOSTILE[2], 0, 1, 1, HOSTILE[0], False, 0, 1, 0, -1)])
    kernels = [kernel(at * 10.0, 9.0, name=name, layer=at + 1) for at, name in enumerate(HOSTILE)]
    made.others.append(record(*kernels, kernel(40, 5, "communication", call=0)))
    run = made.write(new_run(tmp_path / "run", arguments=HOSTILE))
    build_tables(run)
    write_page(open_run(run), run / "report.html")
    page = reader.open(run / "report.html")
    for button in page.get_by_role("button", name="show").all():
        button.click()
        assert any(name in page.locator(".pinned").inner_text() for name in HOSTILE)
    box = page.locator("#picture .picture").bounding_box()
    page.locator("#picture").scroll_into_view_if_needed()
    for share in (0.1, 0.4, 0.6, 0.9):
        page.mouse.move(box["x"] + box["width"] * share, 300)
    page.locator("#kernels canvas").scroll_into_view_if_needed()
    lanes = page.locator("#kernels canvas").bounding_box()
    for share in (0.2, 0.4, 0.6, 0.8):
        page.mouse.move(lanes["x"] + lanes["width"] * share, lanes["y"] + lanes["height"] - 50)
    assert page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1_280


@pytest.mark.parametrize("what", ["nothing", "one allocation", "only init"])
def test_a_small_run_makes_a_page(reader: Reader, tmp_path: Path, what: str) -> None:
    made = HandMade()
    if what != "nothing":
        made.op("init", 0)
        made.alloc(0, MIB)
    if what == "only init":
        made.alloc(4 * MIB, MIB)
        made.free(4 * MIB, MIB)
    run = wrote_nothing(tmp_path / "run") if what == "nothing" else made.write(new_run(tmp_path / "run", "killed"))
    build_tables(run)
    write_page(open_run(run), run / "report.html")
    page = reader.open(run / "report.html")
    assert page.locator("canvas.main").count() == (what != "nothing")


def test_a_step_shows_its_kernels_zooms_and_opens_layers(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    canvas = page.locator("#kernels canvas")
    canvas.scroll_into_view_if_needed()
    status = page.locator("#kernels .status")
    assert status.inner_text() == "0 µs to 1.00 ms of 1.00 ms"
    box = canvas.bounding_box()
    lane = box["y"] + box["height"] - 22 - 1.5 * 22  # of the default stream
    page.mouse.move(box["x"] + 92 + (box["width"] - 100) * 0.05, lane)  # 50 µs: in the first matrix product
    assert "sm90_xmma_gemm" in page.locator("#note").inner_text()
    assert "gemm, forward, at 20.0 µs\n\nlayers.0.mlp" in page.locator("#note").inner_text()
    page.mouse.move(box["x"] + 92 + (box["width"] - 100) * 0.15, lane + 22)
    assert "duration not known" in page.locator("#note").inner_text()
    page.mouse.down()
    page.mouse.move(box["x"] + 92 + (box["width"] - 100) * 0.25, lane + 22)
    page.mouse.up()
    assert status.inner_text().startswith("150 µs to 250 µs")
    canvas.press("0")
    assert status.inner_text() == "0 µs to 1.00 ms of 1.00 ms"
    row = page.locator("#time-table tr", has=page.locator("span.label", has_text="layers.0-2.mlp"))
    row.get_by_role("button").click()
    each = page.locator("#time-table tr.repeat")
    assert [line.locator("th").inner_text() for line in each.all()] == [f"layers.{at}.mlp" for at in range(3)]
    totals = open_run(written.parent).table("layer_times")
    wanted = [format_us(us) for us in totals[totals["name"].str.endswith(".mlp")]["forward_us"]]
    assert [line.locator("td").first.inner_text() for line in each.all()] == wanted
    assert page.locator("#roofline circle").count() == 1  # the one kernel whose operations and bytes are known
