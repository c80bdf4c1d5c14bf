"""The page in a real browser: what a reader does with it. Skipped where Chromium or Playwright is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fakedist.report.render.html import write_page
from fakedist.results.building import build_tables
from fakedist.results.opening import open_run
from fakedist.units import format_bytes, format_us
from tests.page.browser import Reader, drawn, serious_faults
from tests.unit.analysis.recorded import MIB, HandMade, new_run, wrote_nothing
from tests.unit.cost_model.times_by_hand import kernel, record
from tests.unit.report import handmade

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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
    page.get_by_label("find: By layer at the peak").fill("MLP")
    assert first_column(page, "layer-table") == ["layers.0-2.mlp x3"]
    assert page.locator("#layers .told").inner_text() == "1 of 6 rows"
    page.get_by_label("find: By layer at the peak").fill("")
    assert len(first_column(page, "layer-table")) > 3


def test_a_table_is_saved_as_csv_with_plain_numbers(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    panel = page.locator(".panel", has=page.locator("#layer-table"))
    with page.expect_download() as saving:
        panel.get_by_role("button", name="CSV").click()
    assert saving.value.suggested_filename == "fakedist-layer-table.csv"
    found = pd.read_csv(saving.value.path()).set_index("layer")
    assert found.loc["layers.0-2.mlp", "total (bytes)"] == 104 * MIB
    assert len(found) == page.locator("#layer-table tbody tr").count()  # those that are hidden, too


def test_a_table_that_is_cut_says_how_many_columns_follow(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    panel = page.locator(".panel", has=page.locator("#layer-table"))
    further = panel.locator("button.further")
    page.set_viewport_size({"width": 390, "height": 800})
    further.wait_for()
    assert further.inner_text().endswith("more columns \u2192")
    first = page.locator("#layer-table tbody th").first
    before = first.bounding_box()
    panel.locator(".scroll").evaluate("node => { node.scrollLeft = node.scrollWidth; }")
    further.wait_for(state="hidden")
    assert first.bounding_box() == before  # it stays in sight
    page.set_viewport_size({"width": 1280, "height": 900})


def test_a_folded_layer_opens_to_each_of_them(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    row = page.locator("#layer-table tr", has=page.locator("span.label", has_text="layers.0-2.mlp"))
    row.get_by_role("button").click()
    each = page.locator("#layer-table tr.repeat")
    assert [line.locator("th").inner_text() for line in each.all()] == [f"layers.{at}.mlp" for at in range(3)]
    layers = open_run(written.parent).table("layers")
    wanted = layers[layers["name"].str.endswith(".mlp")]["peak_total_bytes"]
    cells = [line.locator("td").all_inner_texts() for line in each.all()]
    assert all(format_bytes(bytes_) in row for bytes_, row in zip(wanted, cells, strict=True))
    row.get_by_role("button").click()
    assert each.count() == 0


def test_a_block_leads_to_its_line_and_to_the_timeline(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    row = page.locator("#blocks tr", has_text="addmm.default").first
    row.get_by_role("button", name="stack").click()
    assert page.locator("#blocks li.own:visible").inner_text() == "model.py:12 (forward)"
    row.locator("td").first.click()  # the row itself unfolds, too
    assert page.locator("#blocks li.own:visible").count() == 0
    row.get_by_role("button", name="show", exact=True).click()
    pinned = page.locator(".pinned").inner_text()
    assert "8.00 MiB activation" in pinned
    assert "model.py:12 (forward)" in pinned


def test_equal_blocks_of_repeated_layers_share_a_row_that_opens_to_each(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    row = page.locator("#blocks tr", has_text="layers.0-2.mlp").filter(has_text="parameter")
    row.get_by_role("button", name="x3").click()
    each = page.locator("#blocks tr.repeat")
    assert [line.locator("td").nth(1).inner_text() for line in each.all()] == [f"layers.{at}.mlp" for at in range(3)]
    each.nth(1).get_by_role("button", name="show").click()
    assert "layers.1.mlp" in page.locator(".pinned").inner_text()
    row.get_by_role("button", name="x3").click()
    assert each.count() == 0


def test_the_first_view_is_around_the_peak_and_the_overview_shows_all(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    peak = open_run(written.parent).summary.peak_allocated_bytes
    assert page.evaluate("fakedist.memory.timeline.peak.bytes") == peak
    drawn(page, "#timeline")
    assert f"peak {format_bytes(peak)}" in page.locator("#timeline .annotation-text").first.text_content()
    assert page.locator("#timeline .rangeslider-container").count() == 1
    curve = "document.querySelector('#timeline .chart').data.find((each) => each.meta === 'allocated')"
    assert page.evaluate(f"Math.max(...{curve}.y)") * 2**20 == peak
    page.get_by_role("button", name="the peak", exact=True).click()
    assert page.locator(".pinned").inner_text().startswith(format_bytes(peak))


def test_every_moment_of_the_chart_is_the_allocators(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    drawn = page.evaluate(
        """() => { const line = fakedist.memory.timeline, found = [];
        for (let move = 0; move < line.numMoves; move += 1) found.push(line.state(move).reduce((a, b) => a + b, 0));
        return found; }"""
    )
    events = open_run(written.parent).table("events")
    assert drawn == events[events["action"].isin(("alloc", "free_requested"))]["allocated_bytes"].tolist()


def test_what_is_pointed_at_is_the_block_that_lies_there(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    run = open_run(written.parent)
    blocks = run.table("blocks")
    alive = blocks[blocks["at_peak"] & (blocks["category"] == "parameter")]
    assert len(alive) == 4
    floors = (alive["bytes"].cumsum() - alive["bytes"]).tolist()
    heights = [floor + at for floor, bytes_ in zip(floors, alive["bytes"], strict=True) for at in (0, int(bytes_) - 1)]
    found = page.evaluate(
        """(heights) => { const { timeline } = fakedist.memory, of = timeline.categories.indexOf('parameter');
        return heights.map((height) => timeline.blockAt(timeline.peak.move, of, height).block); }""",
        [*heights, int(alive["bytes"].sum())],
    )
    assert found == [int(number) for number in alive.index for _ in range(2)] + [-1]


VIEW = "fakedist.memory.view"
_SETTLED = 250  # ms; a drag becomes the view when it has settled


def drag(page: Any, box: Any, *, from_x: float, to_x: float, y: float) -> None:
    page.mouse.move(box["x"] + from_x, box["y"] + y)
    page.mouse.down()
    page.mouse.move(box["x"] + (from_x + to_x) / 2, box["y"] + y, steps=3)
    page.mouse.move(box["x"] + to_x, box["y"] + y, steps=3)
    page.mouse.up()
    page.wait_for_timeout(_SETTLED)


def test_the_timeline_zooms_with_mouse_keys_and_buttons(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    chart = drawn(page, "#timeline")
    box = chart.bounding_box()
    whole = page.evaluate("fakedist.memory.whole")
    chart.press("0")
    assert page.evaluate(VIEW) == whole
    drag(page, box, from_x=300, to_x=700, y=200)
    zoomed = page.evaluate(VIEW)
    share = 400 / (box["width"] - 84)
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) * share, rel=0.05)
    assert page.evaluate("fakedist.calls.view") == zoomed  # their axes are linked
    chart.press("0")
    chart.press("+")
    half = page.evaluate(VIEW)
    assert half[1] - half[0] == (whole[1] - whole[0]) / 2
    chart.press("ArrowRight")
    moved = page.evaluate(VIEW)
    assert moved[0] > half[0]
    page.mouse.dblclick(box["x"] + 500, box["y"] + 200)
    page.wait_for_timeout(_SETTLED)
    assert page.evaluate(VIEW) == whole
    page.locator("#timeline").get_by_label("zoom in").click()
    assert page.evaluate(VIEW) != whole
    page.mouse.move(box["x"] + 400, box["y"] + 350)
    assert "allocated" in page.locator("#note").inner_text()


def test_fingers_drag_and_stretch(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    drawn(page, "#timeline").press("0")
    fingers = """(steps) => {
      const chart = document.querySelector('#timeline .chart'), box = chart.getBoundingClientRect();
      for (const [kind, finger, x] of steps) chart.dispatchEvent(new PointerEvent(`pointer${kind}`, {
        pointerId: finger, pointerType: 'touch', clientX: box.left + x, clientY: box.top + 340, bubbles: true }));
      return fakedist.memory.view;
    }"""
    whole = page.evaluate(VIEW)
    near = page.evaluate(
        fingers, [["down", 1, 400], ["down", 2, 500], ["move", 2, 700], ["up", 1, 400], ["up", 2, 700]]
    )
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 3)
    on = page.evaluate(fingers, [["down", 1, 500], ["move", 1, 400], ["up", 1, 400]])
    assert on[0] > near[0]
    assert on[1] - on[0] == pytest.approx(near[1] - near[0])


def test_the_axis_is_the_order_or_a_time(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    drawn(page, "#timeline").press("0")
    choice = page.get_by_label("the axis of the timeline")
    assert "allocations and frees, in order" in choice.inner_text()
    choice.select_option(label="wall time of the recording")
    page.wait_for_timeout(_SETTLED)
    ticks = page.locator("#timeline .xtick text").all_text_contents()
    assert ticks
    assert all(text.endswith(" ms") for text in ticks)


SECTIONS = ("verdict", "memory", "peak", "layers", "time", "communication", "run", "reading")
_LANDED = """(id) => { const { scrollHeight } = document.documentElement, bar = 64;
  const away = document.getElementById(id).getBoundingClientRect().top - bar;
  return Math.abs(away) < 5 || (away > 0 && scrollY + innerHeight > scrollHeight - 3); }"""


def lands(page: Any, section: str) -> None:
    """Wait until a section is below the bar, or the page at its end; then it stays there."""
    page.wait_for_function(_LANDED, arg=section, timeout=8_000)
    page.wait_for_timeout(_SETTLED)
    assert page.evaluate(_LANDED, section), section


@pytest.mark.parametrize("width", [pytest.param(1440, marks=pytest.mark.nightly), 390])
def test_a_link_lands_at_its_section_and_stays_there(reader: Reader, written: Path, width: int) -> None:
    page = reader.open(written)
    page.set_viewport_size({"width": width, "height": 900})
    for section in SECTIONS:
        for hash_ in (section, f"{section}&moves=2-20"):
            page.goto("about:blank")
            page.goto(f"{written.as_uri()}#{hash_}")
            page.wait_for_selector("html[data-ready]", timeout=20_000)
            lands(page, section)
    page.goto("about:blank")
    page.goto(f"{written.as_uri()}#time")
    page.wait_for_selector("html[data-ready]", timeout=20_000)
    page.set_viewport_size({"width": 900, "height": 700})
    lands(page, "time")


def test_keys_work_after_a_click_and_are_listed(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    chart = drawn(page, "#timeline")
    box = chart.bounding_box()
    page.keyboard.press("0")
    before = page.evaluate(VIEW)
    page.mouse.click(box["x"] + 400, box["y"] + 200)
    page.keyboard.press("w")
    near = page.evaluate(VIEW)
    assert near[1] - near[0] < before[1] - before[0]
    page.keyboard.press("d")
    assert page.evaluate(VIEW)[0] > near[0]
    page.keyboard.press("a")
    page.keyboard.press("s")
    assert page.evaluate(VIEW) == pytest.approx(before)
    page.keyboard.press("?")
    keys = page.locator("dialog#keys")
    assert keys.is_visible()
    assert "zoom in and out" in keys.inner_text()
    page.keyboard.press("Escape")
    assert not keys.is_visible()
    assert page.evaluate("document.activeElement === fakedist.memory.holder")  # the focus is back
    page.get_by_label("find: By layer at the peak").press("?")
    assert not keys.is_visible()
    page.get_by_role("button", name="keys").click()
    keys.get_by_role("button", name="close").click()
    assert not keys.is_visible()


def test_few_blocks_are_drawn_as_blocks(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    drawn(page, "#timeline")
    shapes = "document.querySelector('#timeline .chart').layout.shapes"
    drawn_paths = page.evaluate(f"{shapes}.filter(({{ type }}) => type === 'path').map(({{ path }}) => path)")
    outlines = "".join(drawn_paths).count("M")
    tall = page.evaluate("fakedist.memory.timeline.made.length")
    assert 10 < outlines <= tall
    page.evaluate("fakedist.memory.showBlock(0)")
    page.wait_for_timeout(_SETTLED)
    area = page.locator("#timeline svg.life path").nth(1)
    height = area.evaluate("node => node.getBBox().height")
    assert height < 200  # its own area alone, though it lives all through the run


def test_the_refusal_is_drawn_and_is_the_first_view(reader: Reader, tmp_path: Path) -> None:
    run = handmade.out_of_memory(tmp_path / "run")
    write_page(open_run(run), run / "report.html")
    page = reader.open(run / "report.html")
    chart = drawn(page, "#timeline")
    refusal = page.evaluate("fakedist.memory.refusal")
    assert refusal["text"] == "refused: 90.00 GiB for addmm.default"
    view = page.evaluate(VIEW)
    assert view[0] <= refusal["move"] <= view[1]
    assert refusal["text"] in " ".join(chart.locator(".annotation-text").all_text_contents())
    page.get_by_role("button", name="whole run").click()
    page.get_by_role("button", name="the refusal").click()
    assert page.evaluate("fakedist.memory.moment") == refusal["move"]
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(_SETTLED)
    around = chart.bounding_box()
    labels = [label.bounding_box() for label in chart.locator(".annotation-text").all()]
    assert labels
    for box in labels:  # whole, also where the screen is narrow
        assert around["x"] <= box["x"] <= box["x"] + box["width"] <= around["x"] + around["width"]


def test_the_peak_opens_a_layer_and_goes_back(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    drawn(page, "#picture")
    picture = page.locator("#picture")
    picture.get_by_role("button", name="icicle").click()
    page.wait_for_timeout(_SETTLED)
    assert picture.locator("g.icicle").count() == 1
    assert picture.locator("g.slice").count() > 3
    picture.get_by_label("open a layer below").select_option(index=1)
    assert "(Transformer)" in picture.locator(".path b").inner_text()
    picture.locator(".path button").first.click()
    assert picture.locator(".path b").inner_text().startswith("the peak")


def boxes(page: Any) -> list[str]:
    return [text for text in page.locator("#flame .box").all_inner_texts() if text]


def test_stacks_are_seen_at_the_peak_and_between_two_moments(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    page.locator("#flame").scroll_into_view_if_needed()
    status = page.locator("#flame .status")
    peak = open_run(written.parent).summary.peak_allocated_bytes
    page.locator("#flame .box").first.wait_for()
    assert boxes(page)[0] == f"all {format_bytes(peak)}"
    assert "forward model.py:12" in boxes(page)
    assert not any("linear.py" in text for text in boxes(page))
    page.get_by_label("hide libraries").uncheck()
    assert "forward linear.py:5" in boxes(page)
    page.get_by_label("operations first").check()
    assert boxes(page).index("addmm.default") < boxes(page).index("forward linear.py:5")
    page.get_by_label("find in stacks").fill("addmm")
    assert page.locator("#flame .hit").count() == 1
    assert "found 24.00 MiB" in status.inner_text()
    page.get_by_label("find in stacks").fill("")
    page.locator("#flame .box", has_text="addmm.default").click()  # look inside
    assert "addmm.default: 24.00 MiB" in status.inner_text()
    assert "nll_loss" not in boxes(page)
    flame = page.locator("#flame .flame")
    flame.press("0")
    assert boxes(page)[0].startswith("all")
    flame.press("ArrowDown")
    flame.press("Enter")
    assert page.locator("#flame .box.above").count() == 1
    page.get_by_label("operations first").uncheck()
    timeline = "fakedist.memory.timeline"
    made = page.evaluate(f"{timeline}.block({timeline}.blockAt({timeline}.peak.move, 4, 0).block).made")
    for name, move in (("A", made - 1), ("B", made)):
        page.evaluate("(move) => fakedist.memory.pin(move)", move)
        page.get_by_role("button", name=f"take as {name}").click()
    assert "and not at A" in status.inner_text()
    held = page.evaluate(f"{timeline}.block({timeline}.blockOf[{made}] - 1).bytes")
    assert boxes(page)[0] == f"all {format_bytes(held)}"
    assert page.locator("#timeline .mark").count() == 2


def test_a_block_shows_its_stack_when_it_is_clicked(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    chart = drawn(page, "#timeline")
    timeline = "fakedist.memory.timeline"
    spot = page.evaluate(
        """() => { const { timeline, view, size, seen } = fakedist.memory, { xaxis, yaxis } =
          fakedist.memory.holder._fullLayout, { move } = timeline.peak, state = timeline.state(move);
        const of = timeline.categories.indexOf('activation');
        const below = state.slice(0, of).reduce((sum, each) => sum + each, 0);
        return [xaxis._offset + xaxis.d2p(fakedist.memory.place(move + 0.5)),
          yaxis._offset + yaxis.d2p((below + state[of] / 2) / size)]; }"""
    )
    box = chart.bounding_box()
    page.mouse.click(box["x"] + spot[0], box["y"] + spot[1])
    lines = page.locator(".pinned ol.stack li").all_inner_texts()
    assert lines == ["/site/torch/nn/linear.py:5 (forward)", "model.py:12 (forward)"]
    assert page.locator(".pinned ol.stack li.job").all_inner_texts() == lines[1:]
    assert page.evaluate(f"{timeline}.block(fakedist.memory.block).category") == "activation"


def test_the_chart_is_drawn_in_the_colours_of_the_page(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    filled = """() => [...document.querySelectorAll('#timeline .scatterlayer path.js-fill')]
        .map((each) => each.style.fill)"""
    drawn(page, "#timeline")
    light = page.evaluate(filled)
    assert "rgb(69, 115, 185)" in light  # parameters
    page.get_by_role("button", name="dark colours").click()
    page.wait_for_timeout(_SETTLED)
    assert "rgb(108, 151, 221)" in page.evaluate(filled)
    page.get_by_role("button", name="dark colours").click()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_no_serious_fault(reader: Reader, written: Path, advised: Path, scheme: Any, width: int) -> None:
    told = []
    for path in (written, advised):
        page = reader.open(path)
        page.set_viewport_size({"width": width, "height": 900})
        if page.get_by_role("switch").count():
            page.get_by_role("switch").first.check()
        page.locator("#flame").scroll_into_view_if_needed()
        page.locator("#flame .box").first.wait_for()
        told.append(serious_faults(page, scheme))
        page.set_viewport_size({"width": 1280, "height": 900})
    if told[0] is None:
        pytest.skip("no axe-core: pip install 'fakedist[browser]'")
    assert told == [[], []]


def test_a_chart_is_drawn_when_it_comes_into_view_and_nothing_moves_then(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    lanes = page.locator("#kernels .chart")
    assert lanes.locator("svg").count() == 0
    before = page.evaluate("document.documentElement.scrollHeight")
    height = lanes.bounding_box()["height"]
    assert drawn(page, "#kernels").bounding_box()["height"] == pytest.approx(height, abs=2)
    assert page.evaluate("document.documentElement.scrollHeight") == pytest.approx(before, abs=8)


def test_paper_has_every_chart(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    page.pdf(format="A4")
    charts = page.locator(".chart")
    assert charts.count() > 4
    assert [chart.locator("svg.main-svg").count() > 0 for chart in charts.all()] == [True] * charts.count()


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
    made.record("calls", rows=[(0, HOSTILE[2], 0, 1, 1, HOSTILE[0], False, 0, 1, 0, -1, 0, 0)])
    kernels = [kernel(at * 10.0, 9.0, name=name, layer=at + 1) for at, name in enumerate(HOSTILE)]
    made.others.append(record(*kernels, kernel(40, 5, "communication", call=0)))
    run = made.write(new_run(tmp_path / "run", arguments=HOSTILE))
    build_tables(run)
    write_page(open_run(run), run / "report.html")
    page = reader.open(run / "report.html")
    for button in page.get_by_role("button", name="show").all():
        button.click()
        assert any(name in page.locator(".pinned").inner_text() for name in HOSTILE)
    page.get_by_label("hide libraries").uncheck()
    page.locator("#flame").scroll_into_view_if_needed()
    page.locator("#flame .box").first.wait_for()
    assert any("<script>alert(1)</script>" in text for text in boxes(page))
    for panel in ("#timeline", "#picture", "#kernels", "#calls-over-time"):
        box = drawn(page, panel).bounding_box()
        for across, down in ((0.2, 0.3), (0.3, 0.75), (0.5, 0.5), (0.7, 0.75), (0.9, 0.9)):
            page.mouse.move(box["x"] + box["width"] * across, box["y"] + box["height"] * down)
            page.wait_for_timeout(80)  # plotly waits a little before it shows a hover text
    assert page.locator("img, svg a, svg image").count() == 0
    shown = " ".join(page.locator("#picture text").all_text_contents())
    assert "<img src=x" in shown
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
    if what != "nothing":
        drawn(page, "#timeline")
    assert page.locator("#timeline svg.main-svg").count() == 3 * (what != "nothing")


def test_a_step_shows_its_kernels_zooms_and_opens_layers(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    chart = drawn(page, "#kernels")
    status = page.locator("#kernels .status")
    assert status.inner_text() == "0 µs to 1.00 ms of 1.00 ms"
    spot = """([us, row]) => { const { xaxis, yaxis } = document.querySelector('#kernels .chart')._fullLayout;
      const box = document.querySelector('#kernels .chart').getBoundingClientRect();
      return [box.left + xaxis._offset + xaxis.d2p(us / 1e3), box.top + yaxis._offset + yaxis.d2p(row)]; }"""
    lane = page.evaluate("fakedist.kernels.firstLane")
    page.mouse.move(*page.evaluate(spot, [50, lane]))  # in the first matrix product
    assert "sm90_xmma_gemm" in page.locator("#note").inner_text()
    assert "gemm, forward, at 20.0 µs\n\nlayers.0.mlp" in page.locator("#note").inner_text()
    page.mouse.move(*page.evaluate(spot, [150, lane + 1]))
    assert "duration not known" in page.locator("#note").inner_text()
    page.mouse.down()
    page.mouse.move(*page.evaluate(spot, [200, lane + 1]), steps=3)
    page.mouse.move(*page.evaluate(spot, [250, lane + 1]), steps=3)
    page.mouse.up()
    page.wait_for_timeout(_SETTLED)
    assert status.inner_text().startswith(("150 µs to 250 µs", "150 µs to 249 µs"))  # to a pixel
    chart.press("0")
    assert status.inner_text() == "0 µs to 1.00 ms of 1.00 ms"
    row = page.locator("#time-table tr", has=page.locator("span.label", has_text="layers.0-2.mlp"))
    row.locator("button.open").click()
    each = page.locator("#time-table tr.repeat")
    assert [line.locator("th").inner_text() for line in each.all()] == [f"layers.{at}.mlp" for at in range(3)]
    totals = open_run(written.parent).table("layer_times")
    wanted = [format_us(us) for us in totals[totals["name"].str.endswith(".mlp")]["forward_us"]]
    cells = [line.locator("td").all_inner_texts() for line in each.all()]
    assert all(us in row for us, row in zip(wanted, cells, strict=True))
    assert page.locator("#roofline path.point").count() == 1  # the one kernel whose operations and bytes are known


LANES = """([us, row]) => { const { xaxis, yaxis } = document.querySelector('#kernels .chart')._fullLayout;
  const box = document.querySelector('#kernels .chart').getBoundingClientRect();
  return [box.left + xaxis._offset + xaxis.d2p(us / 1e3), box.top + yaxis._offset + yaxis.d2p(row)]; }"""


def test_lanes_are_named_pinned_searched_and_summed_as_their_tables_say(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    chart = drawn(page, "#kernels")
    pinned, told = page.locator("#kernels .kept"), page.locator("#kernels .told")
    lane = page.evaluate("fakedist.kernels.firstLane")
    titles = page.locator("#kernels .ytick text").all_text_contents()
    assert titles[-2] == "stream 0"
    assert titles[-1].startswith("default_pg all_reduce, tp all")
    page.mouse.click(*page.evaluate(LANES, [50, lane]))
    page.mouse.move(0, 0)
    assert "sm90_xmma_gemm" in pinned.inner_text()
    assert "lane: stream 0" in pinned.inner_text()
    chart.press("Escape")
    assert pinned.is_hidden()
    search = page.get_by_label("find a kernel, collective")
    search.fill("tp all_gather")
    search.press("Enter")
    assert told.inner_text() == "1 of 2"  # both are in the lane of that name
    search.fill("gelu")
    for wanted in ("1 of 9", "2 of 9"):
        search.press("Enter")
        assert told.inner_text() == wanted
    search.press("Shift+Enter")
    assert told.inner_text() == "1 of 9"
    assert "vectorized_elementwise" in pinned.inner_text()
    search.press("Escape")
    assert (told.inner_text(), pinned.is_hidden()) == ("", True)
    for table, column in (("top-kernels", 5), ("time-table", 1)):
        for row in page.locator(f"#{table} tbody tr").all():
            if not row.is_visible():
                continue
            cells = row.locator("th, td").all_inner_texts()
            row.locator("button.lanes").click()
            assert pinned.inner_text().startswith(f"{cells[column].split()[0]} "), (table, cells)
    chart.press("Escape")
    chart.press("0")
    chart.press("s")
    time = open_run(written.parent).summary.time
    assert time is not None
    assert pinned.inner_text().startswith(f"{format_us(time.kernel_us)} in {time.num_kernels + 2} kernels, in view")
    assert "2 of unknown duration" in pinned.inner_text()
    page.keyboard.down("Shift")
    chart.scroll_into_view_if_needed()
    page.mouse.move(*page.evaluate(LANES, [110, lane]))
    page.mouse.down()
    page.mouse.move(*page.evaluate(LANES, [300, lane]), steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    known = open_run(written.parent).table("kernels")
    inside = known[(known["start_us"] > 110) & (known["start_us"] < 300) & (known["stream"] == 0)]["duration_us"]
    assert pinned.inner_text().startswith(f"{format_us(inside.sum())} in {len(inside)} kernels")
    assert page.locator("#kernels .status").inner_text() == "0 µs to 1.00 ms of 1.00 ms"  # it did not zoom


def test_the_critical_path_is_drawn_where_it_is_known(reader: Reader, written: Path, tmp_path: Path) -> None:
    page = reader.open(written)
    drawn(page, "#kernels")
    assert page.get_by_role("checkbox", name="critical path", include_hidden=True).is_hidden()
    run = handmade.ranged(tmp_path / "run")
    write_page(open_run(run), run / "report.html")
    page = reader.open(run / "report.html")
    drawn(page, "#kernels")
    before = page.locator("#kernels path").count()
    page.get_by_role("checkbox", name="critical path", include_hidden=True).check()
    page.wait_for_timeout(_SETTLED)
    assert page.locator("#kernels path").count() == before + 2


def test_the_navigation_of_a_phone_follows_what_is_read(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    page.set_viewport_size({"width": 390, "height": 800})
    page.emulate_media(reduced_motion="reduce")
    for name in ("Time", "Verdict"):
        page.locator(f"#{name.lower()}").evaluate("each => each.scrollIntoView()")
        page.locator("nav a[aria-current]", has_text=name).wait_for()
        inside = """each => [each.getBoundingClientRect(), each.parentElement.getBoundingClientRect()]
            .flatMap(({ left, right }) => [left, right])"""
        left, right, bar_left, bar_right = page.locator("nav a[aria-current]").evaluate(inside)
        assert bar_left <= left < right <= bar_right


def test_notes_that_put_no_figure_in_doubt_are_folded(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    folded = page.locator("#reading details.harmless")
    assert folded.locator("li").first.is_hidden()
    folded.locator("summary").click()
    assert folded.locator("li").first.is_visible()
