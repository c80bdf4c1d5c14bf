"""A trace's times come back exactly, by work; what does not match is counted; what cannot be trusted is refused."""

import dataclasses
from pathlib import Path

import pytest

from fakedist.cost_model.kernels.calibration_table import CalibrationOrigin, made_table
from fakedist.errors import ReportError
from fakedist.extras.calibration.calibrating import Calibrated, calibrate, open_timed_run, read_trace_file, step_change
from fakedist.extras.calibration.matching import recorded_step
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.traces.chrome_trace import read_chrome_trace
from tests.extras.calibration.made_up_step import GPU, Launched, Tracing, kernel, product, step, tables
from tests.unit.cost_model.launches_by_hand import PRODUCT
from tests.unit.results.test_repricing import H100 as H100_MODEL
from tests.unit.results.test_repricing import STEP, priced_run
from tests.unit.traces.nsys_made_up import MAIN, PID, MadeUp

H100 = {"bf16": 989e12, "fp32": 67e12}


def calibrated(
    directory: Path, tracing: Tracing, traced: list[Launched], recorded: list[Launched] | None = None, **more: int
) -> Calibrated:
    """The table from a trace of ``traced`` for a run that recorded ``recorded``; by default one step."""
    path = tracing.write(directory / "trace.json", traced)
    return calibrate(recorded_step(*tables(recorded or step())), read_chrome_trace(path), path, H100, **more)


def times(found: Calibrated) -> dict[tuple[object, ...], float]:
    return {_short(row.work): row.time_us for row in found.table.rows}


def truth(launched: list[Launched]) -> dict[tuple[object, ...], float]:
    return {_short(each.work): each.duration_us for each in launched}


def _short(work: object) -> tuple[object, ...]:
    return tuple(getattr(work, name) for name in ("kind", "name", "m", "n", "k", "moved_bytes"))


def test_the_times_of_a_step_come_back_by_work(tmp_path: Path) -> None:
    found = calibrated(tmp_path, Tracing(), step() * 3)
    assert times(found) == truth(step())
    assert (found.num_steps, found.num_measured, found.num_launches) == (3, len(step()), len(step()))
    assert (found.num_extra, found.num_conflicts, found.num_ambiguous, found.missing) == (0, 0, 0, [])
    rows = {_short(row.work): row.num_kernels for row in found.table.rows}
    assert rows[_short(product(512, 3072, 1024))] == 3 * 6
    assert (found.table.origin.gpu, found.table.origin.tool) == (GPU, "torch.profiler")
    slow = Tracing(
        changed=lambda place, each: dataclasses.replace(each, duration_us=each.duration_us * (9 if place < 45 else 1))
    )
    assert times(calibrated(tmp_path, slow, step() * 3)) == truth(step())  # the median of repetitions counts


@pytest.mark.parametrize("tracing", [Tracing(nccl_every=1), Tracing(with_operations=False)], ids=["nccl", "names"])
def test_neither_kernels_of_nccl_nor_missing_operations_matter(tmp_path: Path, tracing: Tracing) -> None:
    found = calibrated(tmp_path, tracing, step() * 2)
    assert times(found) == truth(step())
    if tracing.nccl_every == 1:
        assert found.num_kernels == 2 * len(step())


def test_kernels_that_the_trace_lacks_are_counted(tmp_path: Path) -> None:
    lost = Tracing(changed=lambda place, each: None if "flash" in each.name else each)
    found = calibrated(tmp_path, lost, step() * 2)
    assert [(each.family, each.count) for each in found.missing] == [("attention", 6)]
    assert times(found) == {key: time for key, time in truth(step()).items() if "flash" not in str(key[1])}


def test_work_that_the_run_does_not_have_is_counted(tmp_path: Path) -> None:
    validation = kernel("void at::native::topk_kernel<float>(float*)", "aten.topk.default", 1e5, "other")
    other = [Launched(validation, "77,1,1", 40.0, validation.name, ("aten::topk",))] * 20
    found = calibrated(tmp_path, Tracing(), step() + other + step())
    assert (found.num_extra, found.num_steps) == (20, 2)
    assert [(each.name, each.time_us) for each in found.extra] == [(validation.name, 800.0)]
    assert times(found) == truth(step())


def test_a_trace_may_begin_and_end_anywhere_in_a_step(tmp_path: Path) -> None:
    found = calibrated(tmp_path, Tracing(), step()[30:] + step() + step()[:20])
    assert times(found) == truth(step())
    assert found.num_extra == 0
    # Kernels outside of steps do not count, though they look like the step's.
    slow = [dataclasses.replace(each, duration_us=999.0) for each in step()[1:4]]
    found = calibrated(tmp_path, Tracing(), slow + step())
    assert (found.num_steps, found.num_extra) == (1, 3)
    assert times(found) == truth(step())


def test_kernels_that_complete_a_product_are_part_of_its_time(tmp_path: Path) -> None:
    reduce = (
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)"
    )
    whole = []
    for each in step():
        whole.append(each)
        if "splitK" in each.name:
            whole.append(dataclasses.replace(each, name=reduce, grid="64,1,1", duration_us=4.0, operations=()))
    found = calibrated(tmp_path, Tracing(nccl_every=0), whole * 2)
    expected = truth(step()) | {_short(product(512, 1024, 4096)): 70.0}
    assert times(found) == expected
    assert found.num_extra == 0


UP = next(number for number, each in enumerate(step()) if each.work == product(512, 4096, 1024))
FLASH = next(number for number, each in enumerate(step()) if "flash" in each.name)


@pytest.mark.parametrize("lost", [(UP,), (FLASH - 1, FLASH)], ids=["one of two neighbours", "and what separates them"])
def test_which_of_several_products_is_missing_is_not_guessed(tmp_path: Path, lost: tuple[int, ...]) -> None:
    tracing = Tracing(changed=lambda at, each: None if at in lost else each)
    found = calibrated(tmp_path, tracing, step())
    assert found.num_ambiguous == 1
    assert found.num_matched == found.num_measured == len(step()) - 1 - len(lost)
    assert times(found) == truth(step())
    if lost == (UP,):
        known = calibrated(tmp_path, dataclasses.replace(tracing, with_inputs=True), step())
        assert (known.num_ambiguous, known.num_measured) == (0, len(step()) - 1)  # sizes of operands tell which it is


def test_inductors_kernels_have_other_numbers_and_grids(tmp_path: Path) -> None:
    def compiled(number: int) -> Launched:
        work = kernel(f"triton_poi_fused_add_mul_{number}", "", 6e5)
        return Launched(work, "512,1,1", 6.0, f"triton_poi_fused_add_mul_{number + 30}", ("CompiledFunction",))

    def again(place: int, each: Launched) -> Launched:
        return dataclasses.replace(each, grid="128,1,1") if each.name.startswith("triton") else each

    recorded = [each if "Functor_add" not in each.name else compiled(place) for place, each in enumerate(step())]
    found = calibrated(tmp_path, Tracing(changed=again), recorded * 2, recorded)
    assert times(found) == truth(recorded)


def test_a_kernel_of_another_grid_or_faster_than_the_gpu_is_not_measured(tmp_path: Path) -> None:
    def longer(place: int, each: Launched) -> Launched:
        return dataclasses.replace(each, grid="16,1,16", duration_us=60.0) if "flash" in each.name else each

    found = calibrated(tmp_path, Tracing(changed=longer), step() * 2)
    assert found.num_conflicts == 12
    assert not any("flash" in row.work.name for row in found.table.rows)

    def fast(place: int, each: Launched) -> Launched:
        return dataclasses.replace(each, duration_us=0.5) if each.work.k == 4096 else each

    found = calibrated(tmp_path, Tracing(changed=fast), step() * 2)
    assert found.num_too_fast == 12
    assert not any(row.work.k == 4096 for row in found.table.rows)


def test_a_report_of_nsys_gives_the_same_times(tmp_path: Path) -> None:
    """Its kernels are named by their templates, its operations are emit_nvtx's ranges."""
    report, at, number = MadeUp(without=("gridX", "gridY", "gridZ")), 1_000_000, 0
    for each in step() * 2:
        at, number = at + 10_000, number + 1
        for depth, name in enumerate(reversed(each.operations)):
            report.range(at + depth, at + 9_000 - depth, f"{name}, seq = {number}, op_id = {number}")
        report.calls.append((at + 100, number, MAIN))
        end = at + 200 + round(each.duration_us * 1000)
        if each.name.startswith("Memcpy"):
            report.copies.append((at + 200, end, number, int(each.work.moved_bytes), 1))
        elif not each.name.startswith("Memset"):
            report.kernels.append((at + 200, end, number, each.name, None, PID))
    path = report.write(tmp_path / "report.sqlite")
    found = calibrate(recorded_step(*tables(step())), read_trace_file(path, path), path, H100)
    assert times(found) == {key: time for key, time in truth(step()).items() if key[0] != "fill"}
    assert [(each.name, each.count) for each in found.missing] == [("Memset", 1)]
    assert found.table.origin.tool == "nsys 2025.5.1"


def test_another_jobs_trace_part_of_a_step_and_the_virtual_gpus_are_refused(tmp_path: Path) -> None:
    def larger(place: int, each: Launched) -> Launched:
        work = each.work._replace(m=each.work.m * 2, moved_bytes=each.work.moved_bytes * 2)
        return dataclasses.replace(each, work=work, grid=each.grid and "2" + each.grid)

    def virtual(place: int, each: Launched) -> Launched:
        grid = "1,1,1" if each.work.k else each.grid
        return dataclasses.replace(each, name=each.work.name, grid=grid, duration_us=1.0)

    with pytest.raises(ReportError, match="looks like another job's"):
        calibrated(tmp_path, Tracing(changed=larger, with_inputs=True), step() * 2)
    with pytest.raises(ReportError, match=r"too little .*: 10 of its 46 launches \(22%; at least 50% are needed\)"):
        calibrated(tmp_path, Tracing(), step()[:10])
    with pytest.raises(ReportError, match="trace of the virtual GPU"):
        calibrated(tmp_path, Tracing(changed=virtual), step())


def test_a_long_trace_is_aligned_within_a_band_and_of_a_very_long_one_the_first_steps_are_read(tmp_path: Path) -> None:
    recorded = step(40)
    lost = Tracing(changed=lambda place, each: None if place % 23 == 4 else each, nccl_every=0)
    found = calibrated(tmp_path, lost, recorded * 4, recorded, most_cells=200_000)
    assert times(found) == truth(recorded)
    assert (found.num_steps, found.num_extra, found.num_unread) == (4, 0, 0)
    found = calibrated(tmp_path, Tracing(nccl_every=0), recorded * 4, recorded, most_cells=100_000)
    assert times(found) == truth(recorded)
    assert found.num_steps == 2  # and part of a third
    assert found.num_unread > len(recorded)


def test_a_calibration_table_changes_the_step_by_what_it_measured(tmp_path: Path) -> None:
    timed = open_timed_run(priced_run(tmp_path / "run", *STEP).path)
    for gpu, model in ((H100_MODEL, ""), (find_gpu("h200"), "h200")):
        table = made_table(CalibrationOrigin(gpu.product, "torch.profiler", "2026-01-31"), {PRODUCT: [5000.0]})
        change = step_change(timed, gpu, table)
        assert (change.gpu, change.model) == (gpu.product, model)
        assert change.step_us > change.estimated_us + 4000
        assert change.step_low_us is not None
        assert change.step_high_us is not None
        assert change.step_low_us <= change.step_us <= change.step_high_us
        assert (0.9 < change.measured < 1.0, change.scaled) == (True, 0.0)
