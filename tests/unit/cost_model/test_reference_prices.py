"""Prices of one of each kind of work, call and communicator, next to those of before.

A price that changes changes a line of ``reference_prices.json``: python -m tests.unit.cost_model.test_reference_prices
writes the file, whose difference is read before it is committed.
"""

import hashlib
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fakedist.cost_model.breakdown import range_lanes, timed
from fakedist.cost_model.collectives.collective_times import FABRICS, CollectiveTimes
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.cost_model.nccl.communicators import Usage, communicator_memory
from fakedist.cost_model.nccl.settings import (
    AMPERE,
    BLACKWELL,
    HOPPER,
    PCIE,
    GroupShape,
    Nccl,
    Network,
    Tuner,
    read_settings,
)
from fakedist.cost_model.step_axis import bars, hidden_parts, kind_runs, layer_runs, longest_runs, trace_events
from fakedist.gpu.models.catalogue import GPUS
from fakedist.results.building import compute_tables
from fakedist.rundir.launch_records import LaunchesRecord, RangeRow, WorkRow
from fakedist.rundir.plain import to_plain
from tests.unit.analysis.recorded import GPU, HandMade, new_run
from tests.unit.cost_model.launches_by_hand import ALL_REDUCE, PRODUCT, UNKNOWN, launch, record
from tests.unit.cost_model.test_kernels import MIX
from tests.unit.cost_model.work_by_hand import attention, moving, product, work

REFERENCE = Path(__file__).parent / "reference_prices.json"
SHAPES = [(8, 1, 8), (4, 1, 4), (2, 1, 2), (5, 1, 5), (2, 2, 1), (16, 2, 8), (12, 4, 3), (64, 8, 8), (128, 128, 1)]
SHAPES += [(1024, 128, 8)]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send")
INTERCONNECTS = {"ampere": AMPERE, "hopper": HOPPER, "blackwell": BLACKWELL, "pcie": PCIE}
FP8 = {"dtype": "fp8", "a_bytes": 1.0, "b_bytes": 1.0}
WORK = (
    *MIX,
    *(product(4096, 4096, 4096, layout=layout, **FP8) for layout in ("TN", "NN")),
    *(product(4096, 4096, 4096, scaling=scaling, **FP8) for scaling in ("tensor", "row", "block", "mx")),
    *(product(m, 4096, 4096) for m in (1, 16, 257, 100_000)),
    product(300, 300, 300, batch=5, layout="NN"),
    product(4096, 4096, 4096, dtype="fp16"),
    product(2048, 2048, 2048, dtype="fp64", a_bytes=8.0, b_bytes=8.0, d_bytes=8.0),
    product(4096, 1024, 4096, groups=64),
    *(
        attention(2048, direction, library=library, **more)
        for direction in ("forward", "backward")
        for library in ("cudnn", "flash2", "flash3", "efficient", "flex", "te", "")
        for more in ({}, {"causal": False, "width": 64}, {"window": 256, "dropout": True, "deterministic": True})
    ),
    attention(1, batch=8)._replace(keys=4096, causal=False),
    attention(4096, width=192)._replace(value_width=128),
    *(
        moving(size, family, name, operation)
        for size in (1e5, 1e8)
        for family, name, operation in (
            ("elementwise", "kernel", "aten.add.Tensor"),
            ("norm", "layer_norm_grad", "aten.native_layer_norm_backward"),
            ("norm", "rms", "aten._fused_rms_norm_backward"), ("norm", "softmax", "aten._log_softmax.default"),
            ("copy", "Memcpy DtoH", ""), ("copy", "CatArrayBatchedCopy", "aten.cat.default"),
            ("copy", "index", "aten.embedding_dense_backward"), ("optimizer", "adam", "aten._foreach_add_"),
            ("other", "scan", "aten.cumsum.default"), ("other", "sort", "aten.sort.default"),
            ("other", "triton_red_fused_3", ""), ("gemm", "pack", ""), ("attention", "prepare", ""),
            ("norm", "triton_red_fused_rms_norm", ""), ("norm", "bn_fw_tr", "aten.native_batch_norm.default"),
            ("norm", "transformer_engine::rmsnorm", ""), ("norm", "layer_norm", "aten.native_layer_norm.default"),
            ("norm", "rms", "aten._fused_rms_norm.default"), ("norm", "nll_loss", "aten.nll_loss_forward.default"),
            ("other", "embedding_bag", ""), ("other", "all_gather_copy", ""), ("copy", "index_put", ""),
        )
    ),
    *(moving(size, "norm", "layer_norm", "aten.layer_norm")._replace(width=width)
      for size in (1e5, 1e8) for width in (64, 1023, 1024, 8192)),
    *(moving(size, "copy", "Memcpy HtoD")._replace(over_host_link=True, pinned=pinned)
      for size in (1e4, 1e8) for pinned in (False, True)),
    product(4096, 4096, 4096, dtype="int8", a_bytes=1.0, b_bytes=1.0, d_bytes=4.0),
    product(4096, 4096, 4096, dtype="fp32", a_bytes=4.0, b_bytes=4.0, d_bytes=4.0, layout="NT"),
    product(4096, 4096, 4096)._replace(flops=8.0 * 4096**3),
    *(product(m, 2048, 4096, groups=groups, dtype=dtype, a_bytes=bytes_, layout=layout)
      for m, groups, dtype, bytes_, layout in (
          (64, 64, "bf16", 2.0, "TN"), (100_000, 8, "bf16", 0.0, "NT"), (9000, 128, "fp8", 1.0, "NN"))),
    *(attention(4096, direction, **more) for direction in ("forward", "backward") for more in (
        {"deterministic": True}, {"dropout": True}, {"is_dense": True}, {"window": 512}, {"window": 100},
        {"dtype": "fp16"}, {"dtype": "fp8"}, {"dtype": "fp32"}, {"library": "flex", "window": 600},
        {"library": "flex", "window": 128}, {"heads": 0}, {"width": 96}, {"kv_heads": 0}, {"keys": 512})),
    WorkRow("lstm", "library", "gemm", "aten._cudnn_rnn", 5.5e11, 1e8, dtype="bf16", steps=512),
    WorkRow("cdist", "kernel", "gemm", "aten._cdist_forward", 1e11, 1e8, dtype="fp32", is_bounded=True),
    WorkRow("unknown", "kernel", "other", flops=float("nan"), moved_bytes=4e8, dtype="bf16"),
)  # fmt: skip


def shown(*figures: float) -> str:
    return " ".join(f"{figure:.4g}" for figure in figures)


def kernels() -> Iterator[tuple[str, str]]:
    for gpu in ("h100-80g", "h200", "a100-80g", "b200", "rtx4090"):
        found = KernelTimes(GPUS[gpu]).price(work(*WORK), np.ones(len(WORK)))
        for at, row in enumerate(found.itertuples()):
            yield (
                f"{gpu} {at} {WORK[at].name}",
                f"{shown(row.low_us, row.time_us, row.high_us)} {row.bound}: {row.basis}",
            )


def choices() -> Iterator[tuple[str, str]]:
    for name, kind, shape in itertools.product(INTERCONNECTS, KINDS, SHAPES):
        tuner = Tuner(INTERCONNECTS[name], Network(), read_settings(Nccl()))
        found = [
            " ".join(f"{each.algorithm[:5]}/{each.protocol} {shown(each.time_us)}" for each in candidates)
            for num_bytes in (1 << 10, 1 << 17, 1 << 23, 1 << 30)
            if (candidates := tuner.candidates(kind, num_bytes, GroupShape(*shape)))
        ]
        yield f"{name} {kind} {shape}", "; ".join(found)
    for name, local, nodes in itertools.product(INTERCONNECTS, (2, 3, 5, 6, 7, 8), (1, 2, 3)):
        tuner, shape = (
            Tuner(INTERCONNECTS[name], Network(), read_settings(Nccl())),
            GroupShape(local * nodes, nodes, local),
        )
        best = [tuner.choose("all_reduce", 1 << power, shape) for power in range(6, 31)]
        trees = [each.time_us for power in range(6, 31) for each in tuner.candidates("all_reduce", 1 << power, shape)
                 if each.algorithm == "tree"]  # fmt: skip
        said = " ".join(f"{each.algorithm[:5]}/{each.protocol}" for each in best[::4])
        yield (
            f"{name} all_reduce {local} x {nodes}",
            f"{shown(*(each.time_us for each in best))}; {said}; {shown(*trees)}",
        )


#: Networks and settings other than the usual ones.
OTHERS = {
    "slow NICs": (Network(12.5e9, 0.5), Nccl()), "NICs of 200": (Network(25e9, 1.0), Nccl()),
    "more NICs": (Network(50e9, 2.0), Nccl()), "2.27": (Network(), Nccl(version="2.27.5")),
    "few channels": (Network(), Nccl({"NCCL_MAX_NCHANNELS": "4"})),
    "no SHARP": (Network(), Nccl({"NCCL_NVLS_ENABLE": "0", "NCCL_PROTO": "Simple"})),
    "trees": (Network(), Nccl({"NCCL_ALGO": "Tree", "NCCL_PAT_ENABLE": "0"})),
}  # fmt: skip


def other_choices() -> Iterator[tuple[str, str]]:
    kinds = ("all_reduce", "all_gather", "broadcast", "barrier", "gather", "send")
    for (name, (network, nccl)), model in itertools.product(OTHERS.items(), INTERCONNECTS):
        tuner = Tuner(INTERCONNECTS[model], network, read_settings(nccl), counts_channels=True)
        for kind, shape in itertools.product(kinds, [(8, 1, 8), (4, 2, 2), (16, 2, 8), (32, 32, 1), (256, 32, 8)]):
            chosen = [tuner.choose(kind, 1 << power, GroupShape(*shape)) for power in (12, 20, 28)]
            said = [f"{each.algorithm}/{each.protocol} {shown(each.time_us)}" for each in chosen]
            likely = sorted(tuner.likely(kind, 1 << 20, GroupShape(*shape)))
            yield f"{name}: {model} {kind} {shape}", f"{'; '.join(said)}; {' '.join(likely)}"


def calls() -> Iterator[tuple[str, str]]:
    models = {"h100-80g": "dgx-h100-ndr", "a100-80g": "dgx-a100-hdr", "l40s": "p5-efa", "gb200": "gb200-nvl72"}
    times = {gpu: CollectiveTimes(GPUS[gpu], FABRICS[fabric]) for gpu, fabric in models.items()}
    for gpu, kind, shape in itertools.product(models, KINDS, SHAPES):
        found = [times[gpu].time(kind, num_bytes, GroupShape(*shape)) for num_bytes in (1 << 12, 1 << 20, 1 << 30)]
        said = [f"{shown(each.time_us, each.spread, each.link_share)} {each.algorithm} {each.basis}" for each in found]
        yield f"{gpu} {kind} {shape}", "; ".join(said)


def memory() -> Iterator[tuple[str, str]]:
    for name, kind, shape in itertools.product(INTERCONNECTS, (*KINDS, "recv"), SHAPES):
        usage = Usage(frozenset({kind}), *((2, 1, 1, 2) if kind in ("send", "recv") else ()))
        found = communicator_memory(GroupShape(*shape), usage, INTERCONNECTS[name], read_settings(Nccl()))
        assert found is not None
        yield f"{name} {kind} {shape}", str({part: (span.low, span.high) for part, span in found.parts.items()})


def _random_step(made: HandMade, seed: int) -> LaunchesRecord:
    """Two micro-batches of repeated layers, with collectives on streams of their own, waits and recomputation."""
    chosen, rows, calls = random.Random(seed), [], []
    top = made.layer("(Net)", "Net")
    blocks = [made.layer(f"layers.{at}", "Block", top) for at in range(3)]
    layers = [made.layer(f"layers.{at}.{name}", "Linear", block) for at, block in enumerate(blocks) for name in "ab"]
    works = [product(4096, 4096, 1024), product(512, 8192, 4096, layout="NT"), attention(2048), moving(3e7),
             moving(1e8, "norm", "layer_norm", "aten.native_layer_norm.default"), PRODUCT, UNKNOWN]  # fmt: skip
    embedding = WorkRow("gather", "kernel", "copy", "aten.embedding.default", 0.0, 1e6, "bf16", m=2048)
    rows.append(launch(embedding, layer=top, num_operations=3))
    for phase, recompute in (("forward", False), ("backward", True), ("backward", False), ("optimizer", False)) * 2:
        for layer in layers if phase == "forward" else layers[::-1]:
            for done in chosen.sample(works, 3):
                more = {"layer": layer, "phase": phase, "recompute": recompute, "op": len(rows)}
                rows.append(launch(done, num_operations=chosen.randint(1, 6), **more))
            if chosen.random() < 0.6:
                number, event, stream = len(calls), 2 * len(calls) + 1, chosen.choice((7, 9))
                kind = chosen.choice(("all_reduce", "all_gather", "reduce_scatter"))
                size = chosen.choice((1 << 20, 1 << 24, 1 << 27))
                calls.append((number, kind, chosen.randint(0, 1), size, size, "bfloat16", True, 0, 1, 0, -1, 0, 0))
                rows += [
                    launch(what="stream_records", event=event, phase=phase),
                    launch(what="stream_waits", event=event, stream=stream, phase=phase),
                    launch(ALL_REDUCE._replace(name=kind), stream=stream, call=number, layer=layer, phase=phase),
                    launch(what="stream_records", event=event + 1, stream=stream, phase=phase),
                ]
                if chosen.random() < 0.7:
                    rows.append(launch(what="stream_waits", event=event + 1, phase=phase))
        rows.append(launch(what=chosen.choice(("host_waits", "host_waits_for_device")), phase=phase))
    names = [(0, "0", "dp", tuple(range(16)), 0, 0, "nccl"), (1, "1", "tp", (0, 1, 2, 3), 0, 0, "nccl")]
    made.record("groups", rows=names)
    made.record("calls", rows=calls)
    ranges = [
        RangeRow("outer", 0, 0, 2, len(rows) // 2),
        RangeRow("inner", 0, 1, 4, 30),
        RangeRow("late", 1, 0, 40, 60),
    ]
    return replace(record(rows), ranges=ranges)


def six_digits(value: object) -> object:
    """Figures with six digits."""
    if isinstance(value, dict):
        return {str(name): six_digits(one) for name, one in value.items()}
    if isinstance(value, list):
        return [six_digits(one) for one in value]
    return f"{value:.6g}" if isinstance(value, float) else value


def steps() -> Iterator[tuple[str, str]]:
    for seed, gpu in enumerate(("h100-80g",)):
        made = HandMade()
        made.others.append(_random_step(made, seed))
        made.gpu = replace(GPU, model=GPUS[gpu])
        made.op("forward", 2)
        made.step(2)
        made.ended()
        with tempfile.TemporaryDirectory() as folder:
            computed = compute_tables(made.write(new_run(Path(folder) / "run", world_size=64)))
        times, tables = computed.times, computed.tables
        for name, value in to_plain(times.summary).items():
            yield f"{seed} {name}", json.dumps(six_digits(value))
        yield f"{seed} source", json.dumps(six_digits(to_plain(times.source)))
        ready = timed(tables["kernels"])
        shown_tables = {name: tables[name] for name in ("kernels", "layer_times", "kernel_names", "ranges")}
        shown_tables |= {"bars": bars(ready, 40), "kinds": kind_runs(ready), "hidden": hidden_parts(ready, 1.0)}
        runs = layer_runs(ready, tables["layers"]["parent"].to_numpy())
        shown_tables |= {"runs": runs, "longest": longest_runs(runs, 9), "lanes": range_lanes(tables["ranges"], 2)}
        for name, table in shown_tables.items():
            for number, row in enumerate(table.astype(object).to_numpy().tolist()):
                yield f"{seed} {name} {number}", " ".join(str(six_digits(one)) for one in row)
        for event in trace_events(tables, times.source, notes := [], most_bars=60):
            yield f"{seed} {hashlib.md5(event.encode()).hexdigest()[:12]}", ""
        yield f"{seed} notes", " ".join(note.text for note in (*notes, *computed.notes))


SECTIONS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "kernels": kernels, "choices": choices, "other_choices": other_choices, "calls": calls, "memory": memory,
    "steps": steps,
}  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_prices_are_what_they_were(section: str) -> None:
    expected = json.loads(REFERENCE.read_text())[section]
    found = dict(SECTIONS[section]())
    assert {name: text for name, text in found.items() if expected.get(name) != text} == {}
    assert list(found) == list(expected)


if __name__ == "__main__":
    REFERENCE.write_text(json.dumps({name: dict(make()) for name, make in SECTIONS.items()}, indent=0) + "\n")
