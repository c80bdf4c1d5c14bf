"""Notes on the times of the timed step. A function makes one note, and its name is the note's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fakedist.options.expert_loads import EVEN
from fakedist.rundir.notes import GRAVITIES, counted, note, share_text, warning
from fakedist.rundir.step_time import AllocatorTime, CpuWork, HostTime
from fakedist.units import format_bytes, format_rank_list, format_us

_MOST_NAMED = 3


@note
def not_timed(why: str) -> str:
    """No step was timed."""
    return f"no kernel times: {why}"


@warning(450)
def timed_early(step: int) -> str:
    """The run ended before the step that was to be timed; an earlier one stands in for it."""
    first = "; the first step may do what no later one does, such as create the optimizer's state" if step == 1 else ""
    return f"the run ended before the step that was to be timed: the times are those of step {step}{first}"


@note
def timed_to_its_optimizer(step: int) -> str:
    """The script ended in the timed step, whose own end is not known."""
    return (
        f"the script ended in step {step}, which is timed up to its last optimizer step: what follows that in a step, "
        "such as averages of parameters, the next batch or a log, is not in its times"
    )


@note
def timed_to_the_end(step: int) -> str:
    """A tool traced the timed step, in which the script ended."""
    return (
        f"the script ended in step {step}, which is timed: what follows its last optimizer step, such as saving a "
        "checkpoint, is in its times"
    )


@note
def profiler_saw_no_kernels() -> str:
    """torch.profiler ran and saw nothing."""
    return (
        "no kernel times: torch.profiler saw no kernels in the timed step; if CUPTI was refused (another profiler, no "
        "permission), the output above tells why"
    )


# ---- the host's time


@warning(400)
def host_not_measured(why: str) -> str:
    """The host's time was to be measured in steps after the recorded ones."""
    return f"the host's time was not measured, and is estimated: {why}"


@warning(410)
def host_measured_as_recorded(why: str) -> str:
    """The host's time was measured in the recorded step, not in steps after it."""
    return (
        "the host's time was measured in the recorded step, without the recorder's own time, which is less certain "
        f"than in steps after it: {why}"
    )


@warning(415)
def second_run_without_time(why: str) -> str:
    """``--clock-run`` ran the script a second time, and that did not measure the host."""
    return (
        f"the second run of --clock-run did not measure the host's time, as {why}: it was measured in the recorded "
        "step, without the recorder's own time, which is less certain"
    )


@warning(420)
def host_clock_disturbed(ratio: float) -> str:
    """Other processes were in the way of the steps in which the host's time was measured."""
    return (
        f"the steps in which the host's time was measured took {ratio:.1f} times their CPU time, as other processes "
        "ran or the script waited; that is left out, but run it again on an idle machine"
    )


@warning(430)
def machine_scores_differ(least_us: float, most_us: float) -> str:
    """The machine's two scores of one run, in us for a forward of a small Linear, are far apart."""
    return (
        f"the same forward of a small Linear took this machine {least_us:.1f} to {most_us:.1f} µs in one run: other "
        "work was in the way, and the host's time may be further off than its interval; run it again on an idle machine"
    )


# ---- estimated times


@warning(330)
def estimate_failed(what: str, error: str) -> str:
    """An estimate ended in an error of fakedist's own. Everything else of the report stands."""
    return f"{what} could not be estimated: {error}; this is a bug in fakedist, and no other figure depends on it"


#: From this fraction on, a fall of the clock is not worth a word.
_FULL_CLOCK = 0.99


@note
def from_measurements(gpu: str, measured_on: str, clock: float, watts: float) -> str:
    """Kernel times are estimated from published measurements.

    Args:
        gpu: The GPU's name.
        measured_on: The measured GPU model, if not this one; else empty.
        clock: The fraction of the full clock that the step keeps.
        watts: The power limit.
    """
    text = f"kernel times are estimated from published measurements of the {measured_on or gpu}"
    if measured_on:
        text += f", as the {gpu} was not measured"
    if clock < _FULL_CLOCK:
        text += f"; products and attention run at {clock:.0%} of the full clock to stay within {watts:,.0f} W"
    return text


@note
def times_calibrated(gpu: str, date: str, measured: float, scaled: float) -> str:
    """Some times were measured on the user's own GPU."""
    return (
        f"measured on your {gpu} on {date}: {share_text(measured)} of kernel time; {share_text(scaled)} is estimated "
        "and scaled by similar kernels that were measured"
    )


@note
def calibration_table_not_used(why: str) -> str:
    """The calibration table that the job names cannot be used any more."""
    return f"the job's calibration table was not used: {why}"


@note
def host_time(time: HostTime) -> str:
    """Where the host's time comes from."""
    interval = f"it may be {time.low:.2g} to {time.high:.2g} times that"
    if time.source == "constant" or time.clock is None:
        slower = "" if time.scale == 1 else f", times {time.scale:.2g} for the host {time.model}"
        return (
            f"the host's time is a constant, not measured: 4 µs an operation of torch and 3 µs a launch{slower}; "
            f"{interval}"
        )
    clock = time.clock
    steps = "the recorded step itself" if clock.is_recorded else counted(clock.num_repeats, "step")
    if clock.is_second_run:
        steps += " of a second run of the script"
    differ = f" (standard deviation {clock.spread:.0%})" if clock.num_repeats > 1 else ""
    text = (
        f"the host's time was measured by {steps} on the machine that recorded the run"
        f"{differ}, and is taken {time.scale:.2g} times for the host {time.model}"
    )
    if time.machine_us is not None and time.host_us is not None:
        text += f", where a forward of torch's Linear takes {time.host_us:.1f} µs, and {time.machine_us:.1f} µs here"
    elif time.machine_us is None:
        text += ", as this machine's speed is not known"
    return f"{text}; {interval}"


@note
def allocator_retries(time: AllocatorTime) -> str:
    """The allocator gives memory back in the timed step, because a request was refused or the script asked it to."""
    back = f"{format_bytes(time.given_back_bytes)} in {counted(time.num_given_back, 'call')}"
    taken = f"{format_bytes(time.taken_bytes)} in {counted(time.num_taken, 'call')}"
    if time.num_retries:
        begin = (
            f"the caching allocator ran out of memory {counted(time.num_retries, 'time')} in the timed step, and each "
            f"time gave back what it cached and asked again: {back}; it took {taken}"
        )
        remedy = "; lower the peak by as much as that and it keeps its cache"
    else:
        begin = f"the caching allocator gave back {back} in the timed step, and took {taken}"
        remedy = "; without torch.cuda.empty_cache() it would keep them"
    span = f"{format_us(time.low_us)} to {format_us(time.high_us)}"
    return (
        f"{begin}. These calls take {format_us(time.time_us)} ({span}), and the host waits {format_us(time.wait_us)} "
        f"for the GPU before them{remedy}"
    )


@note
def cpu_work_estimated(work: CpuWork) -> str:
    """Operations on large tensors of the CPU in the timed step are not computed."""
    line = f", most of it at {work.line}" if work.line else ""
    return (
        f"the time of {counted(work.num_operations, 'operation')} on large floats in the host's memory in the timed "
        f"step, which hold no values, is estimated from the {format_bytes(work.moved_bytes)} that they move: "
        f"{format_us(work.time_us)} ({format_us(work.low_us)} to {format_us(work.high_us)}){line}"
    )


@warning(370)
def collectives_take_no_time() -> str:
    """Estimated times leave collectives out."""
    return "the time of collectives is not estimated: a stream that waits for one continues at once"


@note
def collectives_estimated(fabric: str, source: str, num_unknown: int) -> str:
    """Collectives are priced for a fabric."""
    unknown = f"; the time of {counted(num_unknown, 'call')} is not known" if num_unknown else ""
    text = f"collectives are estimated for the fabric {fabric} ({source}); other ranks are taken to arrive at once"
    return text + unknown


@note
def only_collectives_are_estimated() -> str:
    """A measured step with priced collectives."""
    return (
        "the copies that stood for collectives are left out, and collectives are placed where the measured kernels "
        "leave them; a kernel next to a collective takes longer than was measured, and the interval is the collectives'"
    )


@note
def host_is_slowed() -> str:
    """A measured step, whose host was slowed by the tool that measured it."""
    return "tracing slows the host: without it, the step may take as little as the low end, where no launch is late"


@warning(380)
def collectives_not_priced(why: str) -> str:
    """Collectives of a measured step are the copies that stand for them. Empty ``why``: an unknown GPU model."""
    return f"the time of collectives is that of the copies that stand for them: {why or 'this GPU model is not known'}"


@note
def uneven_splits(num_calls: int) -> str:
    """Some calls of all_to_all have parts of different sizes."""
    calls = counted(num_calls, "all_to_all has", "all_to_all have")
    return (
        f"{calls} uneven splits: what this rank sends or receives counts, whichever is more; other ranks may have more "
        "(--router-load draws what all ranks send)"
    )


@note
def nccl_environment(variables: Mapping[str, str]) -> str:
    """NCCL's variables that the times of collectives follow, by name."""
    named = ", ".join(f"{name}={value}" for name, value in variables.items())
    return f"the times of collectives follow {named}"


@warning(390)
def experts_load(load: str, busiest: float, *, is_recorded: bool) -> str:
    """The load of experts is not known, because the routing is made up. ``busiest``: in times the even load."""
    if load == EVEN:
        text = "an even load of experts, which is optimistic (--router-load prices another)"
    else:
        text = f"the busiest rank of each call by --router-load {load}: {busiest:.2f} x the even load"
    memory = "" if is_recorded else "; memory is still that of the run's own load"
    return f"all_to_all and experts are estimated for {text}{memory}"


@warning(360)
def attention_is_dense(launches: Mapping[str, int]) -> str:
    """flex_attention's masks have no values. Launches by kernel."""
    num_launches = sum(launches.values())
    return (
        f"{counted(num_launches, 'launch', 'launches')} of flex_attention {'is' if num_launches == 1 else 'are'} "
        f"estimated as if every query met every key, because the values of their masks are unknown "
        f"({_named(launches)}): the interval of the step reaches down to one block of keys for each query"
    )


@warning(350)
def not_estimated(launches: Mapping[str, int]) -> str:
    """Launches, by kernel, whose work is not known."""
    text = counted(sum(launches.values()), "launch has", "launches have")
    return f"{text} no estimate, because the work is unknown: {_named(launches)}"


def _named(launches: Mapping[str, int]) -> str:
    names = sorted(launches, key=lambda name: -launches[name])
    more = f" and {len(names) - _MOST_NAMED} others" if len(names) > _MOST_NAMED else ""
    return ", ".join(name[:80] or "unnamed" for name in names[:_MOST_NAMED]) + more


# ---- traced times


@warning(340)
def times_are_not_a_gpus() -> str:
    """CUPTI traced the virtual GPU."""
    return "each kernel takes 1 µs on the virtual GPU: their order is the job's, their times are not a GPU's"


@note
def kernels_without_launch(count: int, num_all: int) -> str:
    """Kernels, copies and fills whose launch was not traced."""
    return f"{count:,} of {num_all:,} kernels, copies and fills without a traced launch: of no layer"


@note
def kernels_of_graphs(count: int) -> str:
    """Kernels of CUDA graphs whose capture was not traced."""
    return f"{counted(count, 'kernel')} of CUDA graphs count for the layer that launched the graph"


@note
def graphs_as_a_whole(count: int) -> str:
    """CUDA graphs without their kernels."""
    hint = "nsys profile --cuda-graph-trace=node shows its kernels"
    return f"{counted(count, 'CUDA graph')} traced as a whole: one row each; {hint}"


@note
def no_layers_traced() -> str:
    """No range names a layer."""
    return "no range of the trace names a layer: every kernel is outside of modules"


@note
def forward_not_traced(count: int) -> str:
    """Kernels of a backward whose forward is not in the trace."""
    return f"{counted(count, 'kernel')} of backward without a known layer: their forward was not traced"


@note
def no_phases_traced() -> str:
    """No range names a phase."""
    return "no range of the trace names forward, backward or optimizer: every kernel's phase is other"


@note
def no_operations_traced() -> str:
    """No range names an operation."""
    return "no range of the trace names operations: it is not known which forwards are recomputed"


@note
def no_steps_traced() -> str:
    """No range of a file names a step."""
    return "no range of the file names a step: everything in it counts as one step"


@note
def no_kernels_traced() -> str:
    """A file has only copies and fills of a step."""
    return "the file has copies and fills of memory alone: no kernel was traced, or none ran"


@note
def several_processes(num_parts: int, chosen: tuple[int, int], others: Sequence[tuple[int, int]]) -> str:
    """A file has kernels of several processes or GPUs: (process, GPU) of the chosen one and of the others."""
    named = ", ".join(f"--process {process} --gpu-index {device}" for process, device in others[:_MOST_NAMED])
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    return (
        f"the file has kernels of {num_parts} processes and GPUs; these are of process {chosen[0]} on GPU {chosen[1]} "
        f"({named}{more})"
    )


@note
def memory_traced(allocated_bytes: int, reserved_bytes: int, step: int) -> str:
    """torch.profiler traced the allocator, with profile_memory=True. ``step`` is -1 if the file marks none."""
    where = "the whole file" if step < 0 else f"step {step}"
    return (
        f"torch.profiler counts at most {format_bytes(allocated_bytes)} allocated and {format_bytes(reserved_bytes)} "
        f"reserved in {where}; phases and categories are inferred from the ranges around each request, from what stays "
        "alive, and from sizes"
    )


@note
def events_not_read(count: int) -> str:
    """Events of a trace that no tool writes so."""
    return f"{counted(count, 'event')} of the trace {'is' if count == 1 else 'are'} damaged and left out"


@note
def trace_cut_off(count: int) -> str:
    """A trace ends in the middle of an event, as that of a killed job."""
    return f"the trace is cut off after {counted(count, 'event')}, and what it lost is not counted"


# ---- several ranks of a job


@note
def exchanges_elsewhere(rank: int, others: Sequence[int]) -> str:
    """A rank exchanges with ranks that are not priced with it."""
    named = ", ".join(map(str, others[:_MOST_NAMED])) + (", ..." if len(others) > _MOST_NAMED else "")
    which = f"rank{'s' if len(others) > 1 else ''} {named}"
    return f"rank {rank} sends to or receives from {which}, not given here: these transfers do not wait for each other"


@note
def unmatched_calls(rank: int, number: int) -> str:
    """Calls of a rank that the others never make."""
    have, wait = ("have", "wait") if number > 1 else ("has", "waits")
    text = f"{counted(number, 'call')} of rank {rank} with the other ranks {have} no other side in their timed steps"
    return f"{text}, and {wait} for nothing"


@warning(445)
def receives_lacking(ranks: Sequence[int]) -> str:
    """Ranks of which the timed step lacks a first receive, which the script makes before the step's first forward."""
    whose = f"each of ranks {format_rank_list(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return (
        f"the timed step of {whose} lacks its first receive, as the script ended after it: its first forward does "
        "not wait, and the job's step may be too short, by a forward of each stage; let the script run one more step"
    )


@note
def micro_batches_repeated(recorded: int, wanted: int) -> str:
    """Micro-batches beyond those that were recorded are priced."""
    return (
        f"{recorded} micro-batches were recorded, and those beyond repeat a steady one, up to {wanted}; memory is that "
        "of the recorded ones"
    )


@note
def exchange_nothing(ranks: Sequence[int]) -> str:
    """Ranks that are priced together have nothing to do with each other."""
    return f"ranks {', '.join(map(str, ranks))} send nothing to each other: the step is that of the slowest"


@note
def tokens_not_known(why: str) -> str:
    """The tokens of the job's step are not known."""
    return f"tokens of a step are not known: {why}; --tokens-per-step N gives them"


@note
def flops_not_counted(why: str) -> str:
    """The FLOPs of the job's step are not known."""
    return f"no TFLOP/s and no MFU: {why}"


#: Codes of the notes which say that a figure is made up, missing or may be wrong; the gravest first.
WARNINGS = tuple(sorted(GRAVITIES, key=GRAVITIES.__getitem__))
