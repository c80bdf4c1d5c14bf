"""Rules of time: what makes the timed step longer than it has to be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from fakedist.findings.case import Case, base_name
from fakedist.findings.registry import Fault, rule
from fakedist.rundir.notes import counted
from fakedist.rundir.step_time import CpuWork
from fakedist.units import format_bytes, format_us

_FEWEST_SMALL = 16
_SMALL_BYTES = 1 << 20
_GAP_SHARE = 0.1
#: Gradients that are reduced in 16 bits have half of the bytes of fp32 parameters.
_MOST_GRADIENTS = 0.45
_LOADING_SHARE = 0.05
#: To take a ready batch takes the main thread this long.
_LEAST_LOADING_US = 500.0
#: Less of the CPU's own work between two launches is Python's, such as of a Trainer's callbacks.
_LEAST_GAP_US = 2000.0
#: Where others took the cores: several of the scheduler's slices of 4 ms.
_LEAST_DISTURBED_US = 20_000.0
_MOST_LINES = 2
_FEWER_LAUNCHES = ("--what-if cuda-graphs", "--what-if compile")
#: What a row of a product's operand has to be a multiple of, so that Tensor Cores load it: 16 bytes.
_ALIGNED_BYTES = 16


@rule("FD201", "gradients all-reduced in each micro-batch", "calls", "spans", "kernels")
def repeated_reductions(case: Case) -> Iterator[Fault]:
    """With gradient accumulation, every micro-batch all-reduces all gradients, though only their sum is needed.

    The rule sees the same all-reduces of one group, of most gradients and from the same layers, with each backward of
    the timed step.

    **Mend**: `with model.no_sync():` around all micro-batches but the last (DDP). With hybrid sharding,
    `set_requires_all_reduce(False)`, which costs no memory; `no_sync` of FSDP does (FD103).
    DeepSpeed's ZeRO-2 reduces in each micro-batch by design; ZeRO-1 does not.

    Reported in cosmos-framework#161 (four times the communication).
    """
    evidence = case.evidence
    calls, replicas, time = evidence.last_calls, evidence.replicas, case.time
    if replicas is None or time is None:
        return
    calls = calls[calls["operation"].str.startswith("all_reduce") & (calls["phase"] != "forward")]
    calls = calls[calls["group"] == replicas.number]
    step = min(int(calls["step"].max()), int(evidence.spans["step"].max())) if len(calls) else 0
    spans = evidence.spans[(evidence.spans["step"] == step).to_numpy()]
    backward, optimizer = case.in_phase(spans, "backward"), case.in_phase(spans, "optimizer")
    number = int(backward.sum())
    if number < 2 or not len(calls) or optimizer[: backward.nonzero()[0][-1]].any():  # each has an update of its own
        return
    # Others are made once a step, such as those of norms and metrics.
    calls = calls[calls.groupby("bytes_in")["sequence"].transform("count") % number == 0]
    gathered = evidence.category("parameter") & evidence.phase("forward", "backward")
    held = evidence.at_peak(evidence.category("parameter")) - evidence.at_peak(gathered)
    parts = np.array_split(calls[["bytes_in", "layer"]].to_numpy(), number)
    is_all = calls["bytes_in"].sum() >= _MOST_GRADIENTS * number * held
    if not is_all or any((part != parts[0]).any() for part in parts):
        return
    group = [row for row in time.by_group if row.group == replicas.label and row.operation.startswith("all_reduce")]
    takes = evidence.calls_us(calls["sequence"]) * (number - 1) / number
    exposed = min(takes, sum(row.exposed_us for row in group))
    repeated = int(calls["bytes_in"].sum() * (number - 1) / number)
    if case.is_worth_us(takes):
        yield Fault(
            f"each of {number} micro-batches all-reduces all gradients over {replicas.label}: "
            f"{format_bytes(repeated)} and {format_us(takes)} a step more than once would be, "
            f"{format_us(exposed)} of it exposed",
            "set_requires_all_reduce(False) for all micro-batches but the last"
            if evidence.last_calls["operation"].str.startswith("reduce_scatter").any()
            else "no_sync() around all micro-batches but the last (DeepSpeed's ZeRO-2: ZeRO-1)",
            gives_us=(0.0, exposed),
        )


@rule("FD202", "small collectives that could be one", "calls", "kernels", "call_terms")
def small_collectives(case: Case) -> Iterator[Fault]:
    """Many small calls of one operation and group follow one another. Each takes a collective's latency.

    The rule sees 16 or more of them in a row, each of at most 1 MiB, which together are a fiftieth of the step. Half as
    many are in the step before, if there is one: DDP makes some in the second step alone.

    **Mend**: flatten the tensors into one, or `torch.distributed._coalescing_manager`.
    """
    evidence = case.evidence
    if case.time is None or evidence.kernels is None:
        return
    calls = evidence.last_calls.sort_values("sequence")
    terms = case.table("call_terms")
    batch = terms["batch"].iloc[np.minimum(calls.index, len(terms) - 1)].to_numpy() if len(terms) else 0
    is_small = (
        (calls["bytes_in"] <= _SMALL_BYTES).to_numpy() & (calls["peer"] < 0).to_numpy() & (np.asarray(batch) == 0)
    )
    key = calls["operation"] + calls["group"].astype(str) + calls["phase"]
    run = ((key != key.shift()) | ~is_small | (np.diff(calls["sequence"], prepend=-2) != 1)).cumsum()
    taken = evidence.kernels.loc[evidence.kernels["is_call"]].set_index("call")["duration_us"]
    before = evidence.calls[evidence.calls["step"] == calls["step"].max() - 1].astype({"operation": str, "phase": str})
    usual = key.map((before["operation"] + before["group"].astype(str) + before["phase"]).value_counts()).fillna(0)
    runs = [
        (same, taken.reindex(same["sequence"]).dropna().sort_values())
        for _, same in calls[is_small].groupby(run[is_small])
        if len(same) >= _FEWEST_SMALL and (calls["step"].max() < 2 or 2 * usual[same.index[0]] >= len(same))
    ]
    same, times = max(runs, key=lambda one: one[1].iloc[:-1].sum(), default=(calls, taken.iloc[:0]))
    more = float(times.iloc[:-1].sum())
    if not case.is_worth_us(more):
        return
    yield Fault(
        f"{len(same)} calls of {same['operation'].iloc[0]} on {evidence.group_label(int(same['group'].iloc[0]))} "
        "follow one another with "
        f"{format_bytes(int(same['bytes_in'].max()))} or less each, and take {format_us(float(times.sum()))}; "
        f"the longest takes {format_us(float(times.max()))}",
        "one call of a flat tensor",
        case.lines_of_operations.get(int(same["op"].iloc[0]), ""),
        gives_us=(0.0, more),
    )


@rule("FD203", "the host waits for the GPU within the step")
def host_waits(case: Case) -> Iterator[Fault]:
    """A line reads what the GPU computed, so the host stands still, and the GPU is idle until it launches again.

    `.item()`, `.tolist()`, `nonzero`, indexing by a mask, `print` of a tensor and copies from pageable memory wait.

    The rule sees lines without whose waits the step, placed anew, is a fiftieth shorter: after a wait the host is no
    longer ahead, so launches behind it come late, too.

    **Mend**: keep the value on the GPU, read it once a step or every so many steps, copy with pinned memory and
    `non_blocking=True`.
    """
    time = case.time
    if time is None:
        return
    without = {gain.option: gain.step_us for gain in time.gains if not gain.is_pair}
    for where in list(dict.fromkeys(wait.line or wait.operation for wait in time.host_waits))[:_MOST_LINES]:
        waits = [wait for wait in time.host_waits if (wait.line or wait.operation) == where]
        idle_us = sum(wait.idle_us for wait in waits)
        line = waits[0].line
        option = f"--what-if no-sync={line.partition(' (')[0].rpartition('/')[2]}"
        gives = sorted((idle_us, time.step_us - without.get(option, time.step_us)))
        if case.is_worth_us(gives[1]):
            yield Fault(
                f"the host waits {counted(sum(wait.num_waits for wait in waits), 'time')} for the GPU "
                f"({base_name(waits[0].operation) or waits[0].kind}), which is idle then for {format_us(idle_us)}",
                "leave the value on the GPU, or read it less often",
                line,
                gives_us=(gives[0], gives[1]),
                advice=option,
            )


@rule("FD204", "launches that the host cannot keep up with")
def late_launches(case: Case) -> Iterator[Fault]:
    """The GPU waits for the host: kernels are shorter than what launching them takes.

    The rule sees a tenth or more of the step in which the GPU is idle until a launch comes, waits of the host for the
    GPU (FD203) and its work outside of forward, backward and optimizer (FD208) apart.

    **Mend**: `torch.compile`, CUDA graphs, larger micro-batches, fused optimizers and fewer small operations.
    """
    time = case.time
    if time is None or not time.late_launches:
        return
    own_us = max(float(_gaps(case)["late_us"].sum()), work.time_us if (work := _cpu_work(case)) else 0.0)
    late = time.launch_gap_us - sum(wait.idle_us for wait in time.host_waits) - own_us
    if late < _GAP_SHARE * time.step_us:
        return
    worst = max(time.late_launches, key=lambda row: row.late_us)
    better = [gain for gain in time.gains if not gain.is_pair and gain.option.partition("=")[0] in _FEWER_LAUNCHES]
    best = min((gain.step_us for gain in better), default=time.step_us - late)
    yield Fault(
        f"the GPU waits {format_us(late)} of {format_us(time.step_us)} for launches of the host",
        better[0].title if better else "torch.compile, CUDA graphs or larger micro-batches",
        worst.line,
        gives_us=(0.0, max(time.step_us - best, late)),
        is_certain=False,
        advice=better[0].option if better else "",
    )


@rule("FD205", "products in fp32", "kernels", "launches", "work")
def plain_products(case: Case) -> Iterator[Fault]:
    """Products run in fp32, without Tensor Cores.

    torch computes fp32 products in full precision unless TF32 is allowed.

    The rule sees products of fp32 whose time is a fiftieth of the step. At least, they would take their FLOPs at the
    GPU's TF32 peak.

    **Mend**: `torch.set_float32_matmul_precision("high")`, or autocast to bf16.
    """
    kernels, time = case.kernels, case.time
    if not len(kernels) or time is None or time.peaks is None or "tf32" not in time.peaks.flops:
        return
    plain = kernels[kernels["kind"].isin(["product"]).to_numpy() & (kernels["dtype"] == "fp32").to_numpy()]
    takes = float(plain["duration_us"].sum())
    could = float(plain["flops"].sum()) / time.peaks.flops["tf32"] * 1e6
    if case.is_worth_us(takes - could):
        yield Fault(
            f"{counted(len(plain), 'product')} in fp32 take {format_us(takes)}; at the TF32 peak they would take "
            f"{format_us(could)}",
            'torch.set_float32_matmul_precision("high"), or autocast to bf16',
            case.main_line(plain),
            gives_us=(0.0, takes - could),
        )


@rule("FD206", "products whose sizes are not aligned", "kernels", "launches", "work")
def odd_sizes(case: Case) -> Iterator[Fault]:
    """A dimension of a product is not a multiple of 16 bytes, so Tensor Cores cannot load its rows at full width.

    Usually it is a vocabulary such as 50,257. cuBLAS then takes kernels with narrower loads, or pads.

    The rule sees products in 8 or 16 bits, a fiftieth of the step, whose columns or sums are not such a multiple. How
    much slower they are is not in fakedist's tables, so it gives their time and no gain.

    **Mend**: pad the vocabulary, or the width, to a multiple of 64.
    """
    kernels = case.kernels
    if not len(kernels):
        return
    products = kernels[kernels["kind"].isin(["product"]).to_numpy() & (kernels["a_bytes"].between(1, 2)).to_numpy()]
    multiple = (_ALIGNED_BYTES // products["a_bytes"].clip(lower=1)).astype(int)
    odd = pd.DataFrame({name: products[name] % multiple != 0 for name in ("m", "n", "k")})
    # The rows of activations are tokens, which only products for weights sum over.
    is_forward = case.in_phase(products, "forward")
    sizes = products.loc[is_forward & (odd["n"] | odd["k"]), ["n", "k"]]
    wrong = {int(size) for size in sizes.to_numpy().ravel() if size > 1 and size % 8}
    chosen = products[products[["m", "n", "k"]].isin(wrong).any(axis=1) & odd.any(axis=1)]
    takes = float(chosen["duration_us"].sum())
    if wrong and case.is_worth_us(takes):
        size = max(wrong)
        yield Fault(
            f"{counted(len(chosen), 'product')} with a dimension of {size:,}, not a multiple of "
            f"{int(multiple.max())}, take {format_us(takes)}",
            f"pad {size:,} to {-(-size // 64) * 64:,}",
            case.main_line(chosen),
            costs_us=takes,
        )


@rule("FD207", "the default stream between communication and compute", "calls", "call_terms", "launches", "kernels")
def reductions_in_the_way(case: Case) -> Iterator[Fault]:
    """Backward waits for each reduction of gradients, which it does not read.

    A collective that is not asynchronous is on the stream that computes; of one with a `wait()` or `wait_stream` right
    behind it, that stream waits. It waits for what was computed before, and what is computed after waits for it.

    The rule sees all-reduces, reduce-scatters and reduces in backward, of groups that exchange nothing in forward. The
    stream that computes waits for them before it runs another kernel, and backward goes on behind them.

    **Mend**: `async_op=True`, and wait for all of them once, before the optimizer's step. DDP and FSDP do; DeepSpeed
    does with `overlap_comm`.
    """
    evidence, time, launches = case.evidence, case.time, case.table("launches")
    calls = evidence.last_calls
    if time is None or evidence.kernels is None or not len(launches):
        return
    in_forward = set(calls.loc[(calls["phase"] == "forward") & (calls["operation"] != "broadcast"), "group"])
    reduces = calls["operation"].str.startswith(("all_reduce", "reduce")) & (calls["phase"] == "backward")
    is_ours = calls["group"].map(lambda group: group not in in_forward and evidence.group_size(group) > 1).astype(bool)
    is_call = (launches["what"] == "collective").to_numpy()
    chosen = is_call & launches["call"].isin(calls.loc[reduces & is_ours, "sequence"]).to_numpy()
    works = (launches["work"] >= 0).to_numpy() & ~is_call
    stream = launches["stream"].to_numpy()
    main = int(launches["stream"][works].mode().max()) if works.any() else 0
    takes = evidence.kernels.groupby("launch")["duration_us"].sum().reindex(range(len(launches)), fill_value=0.0)
    on_main = np.append(np.flatnonzero(works & (stream == main)), len(launches))
    ends = np.append(np.flatnonzero(works & case.in_phase(launches, "forward", "optimizer")), len(launches))
    held: dict[int, tuple[float, float]] = {}
    for at in np.flatnonzero(chosen).tolist():
        first, last = np.searchsorted(on_main, (at, ends[np.searchsorted(ends, at)]))
        behind_us = float(takes[on_main[first:last]].sum())
        if stream[at] == main or _waits_for(launches[at : on_main[first]], main):
            held[at] = min(float(takes[at]), behind_us), behind_us
    operations = set(calls["operation"][reduces & is_ours])
    exposed = sum(row.exposed_us for row in time.by_group if row.operation in operations)
    hidden, most = sum(one for one, _ in held.values()), max((behind for _, behind in held.values()), default=0.0)
    gives = min(hidden, most, exposed)
    if not case.is_worth_us(gives):
        return
    is_held = case.table("calls")["sequence"].isin(launches["call"].iloc[list(held)]).to_numpy()
    terms = case.table("call_terms")["lines"][is_held]
    yield Fault(
        f"backward waits for {counted(len(held), 'reduction')} of gradients, which take "
        f"{format_us(float(takes[list(held)].sum()))}, before it goes on; {format_us(gives)} could be hidden",
        "async_op=True, and one wait for all before the optimizer's step (DeepSpeed: overlap_comm)",
        next((lines.partition("\n")[0] for lines in terms if lines), ""),
        gives_us=(0.0, gives),
    )


def _waits_for(rows: pd.DataFrame, main: int) -> bool:
    """Whether a stream waits for the collective that is the first of some launches."""
    is_own = (rows["what"] == "stream_records") & (rows["stream"] == rows["stream"].iloc[0])
    waits = (rows["what"] == "stream_waits") & (rows["stream"] == main)
    return bool(rows["event"][waits].isin(rows["event"][is_own]).any())


@rule("FD208", "data loading, or other work of the CPU, in the step")
def loading(case: Case) -> Iterator[Fault]:
    """The CPU loads, decodes or augments the next batch, or saves a file, while the GPU has nothing to do.

    The main thread is in a DataLoader's iterator, where it loads the batch itself or waits for a worker; or the script
    computes on the CPU between two steps, with numpy, PIL, a tokenizer or tensors of the CPU.

    The rule sees a twentieth or more of the step, and half a millisecond, in DataLoaders' iterators, as measured where
    the run was recorded, or by torch.profiler. Or it sees gaps of 2 ms or more between two launches outside of forward,
    backward and optimizer, a tenth of the step, in which the GPU is idle; 20 ms where other processes were in the way
    of the measurement. Operations on large CPU tensors are not run;
    their time is estimated, with a wide interval.

    **Mend**: a DataLoader with `num_workers` above 0, `prefetch_factor`, `persistent_workers=True` and
    `pin_memory=True`; less work in `__getitem__`; augmentation on the GPU.
    """
    time = case.time
    if time is None:
        return
    gaps = _gaps(case)
    traced_us = case.summary.kernels.loading_us if case.summary.kernels else 0.0
    loading_us = min(time.loading_us or traced_us, time.step_us)
    late_us = float(gaps["late_us"].sum())
    if loading_us >= max(_LOADING_SHARE * time.step_us, late_us / 2, _LEAST_LOADING_US):
        yield Fault(
            f"the main thread is in a DataLoader's iterator for {format_us(loading_us)} of {format_us(time.step_us)}",
            "worker processes that prefetch: num_workers, prefetch_factor, persistent_workers",
            gives_us=(0.0, loading_us),
            is_certain=traced_us > 0,
        )
    elif late_us >= _GAP_SHARE * time.step_us:
        work = _cpu_work(case)
        on_cpu = f"; operations on its large tensors take {format_us(work.time_us)}, estimated" if work else ""
        op = int(gaps["op"].to_numpy()[gaps["late_us"].to_numpy().argmax()])
        yield Fault(
            f"the GPU waits {format_us(late_us)} of {format_us(time.step_us)} for the CPU, which works outside of "
            f"forward, backward and optimizer{on_cpu}",
            "worker processes for batches (num_workers of a DataLoader), a thread for files, or the work on the GPU",
            (work.line if work else "") or case.lines_of_operations.get(op, ""),
            gives_us=(0.0, late_us),
            is_certain=False,
        )


def _cpu_work(case: Case) -> CpuWork | None:
    return None if case.summary.kernels is None else case.summary.kernels.cpu_work


def _gaps(case: Case) -> pd.DataFrame:
    """Launches outside of forward, backward and optimizer that come late by the CPU's own work: columns late_us, op.

    The first one of a step counts, too: what comes before it is between two steps.
    """
    nothing = pd.DataFrame({"late_us": [0.0], "op": [-1]})[:0]
    if not (case.has("host") and case.has("launches")):
        return nothing
    host, launches = case.table("host"), case.table("launches")
    if not len(host):
        return nothing
    own = (host["reached_us"] - host["begin_us"]).to_numpy()
    late = np.minimum(host["late_us"].to_numpy(), own)
    is_between = case.in_phase(launches, "other") | (np.arange(len(launches)) == 0)
    is_disturbed = any(note.code == "host_clock_disturbed" for note in case.summary.notes)
    rows = np.flatnonzero(is_between & (late >= (_LEAST_DISTURBED_US if is_disturbed else _LEAST_GAP_US)))
    return pd.DataFrame({"late_us": late[rows], "op": launches["op"].to_numpy()[rows]})
