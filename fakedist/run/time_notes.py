"""Notes on the times of the timed step. A function makes one note, and its name is the note's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fakedist.run.notes import Note, counted, share_text

_MOST_NAMED = 3


def not_timed(why: str) -> Note:
    """No step was timed."""
    return Note("not_timed", f"no kernel times: {why}")


def timed_to_its_optimizer(step: int) -> Note:
    """The script ended in the timed step, whose own end is not known."""
    text = (
        f"the script ended in step {step}, which is timed up to its last optimizer step: what follows that in a step, "
        "such as averages of parameters or the next batch's copy, is not in its times"
    )
    return Note("timed_to_its_optimizer", text)


def timed_to_the_end(step: int) -> Note:
    """A tool traced the timed step, in which the script ended."""
    text = (
        f"the script ended in step {step}, which is timed: what follows its last optimizer step, such as saving a "
        "checkpoint, is in its times"
    )
    return Note("timed_to_the_end", text)


def profiler_saw_no_kernels() -> Note:
    """torch.profiler ran and saw nothing."""
    text = (
        "no kernel times: torch.profiler saw no kernels in the timed step; if CUPTI was refused (another profiler, no "
        "permission), the output above tells why"
    )
    return Note("profiler_saw_no_kernels", text)


# ---- estimated times


#: From this fraction on, a fall of the clock is not worth a word.
_FULL_CLOCK = 0.99


def from_measurements(gpu: str, measured_on: str, clock: float, watts: float) -> Note:
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
    return Note("from_measurements", text)


def own_times(gpu: str, date: str, measured: float, scaled: float) -> Note:
    """Some times were measured on the user's own GPU."""
    text = (
        f"measured on your {gpu} on {date}: {share_text(measured)} of kernel time; {share_text(scaled)} is estimated "
        "and scaled by similar kernels that were measured"
    )
    return Note("own_times", text)


def own_times_not_used(why: str) -> Note:
    """The table of own times that the job names cannot be used any more."""
    return Note("own_times_not_used", f"the job's own times were not used: {why}")


def collectives_take_no_time() -> Note:
    """Estimated times leave collectives out."""
    text = "the time of collectives is not estimated: a stream that waits for one continues at once"
    return Note("collectives_take_no_time", text)


def collectives_estimated(fabric: str, source: str, num_unknown: int) -> Note:
    """Collectives are priced for a fabric."""
    unknown = f"; the time of {counted(num_unknown, 'call')} is not known" if num_unknown else ""
    text = f"collectives are estimated for the fabric {fabric} ({source}); other ranks are taken to arrive at once"
    return Note("collectives_estimated", text + unknown)


def only_collectives_are_estimated() -> Note:
    """A measured step with priced collectives."""
    text = (
        "the copies that stood for collectives are left out, and collectives are placed where the measured kernels "
        "leave them; a kernel next to a collective takes longer than was measured, and the interval is the collectives'"
    )
    return Note("only_collectives_are_estimated", text)


def collectives_not_priced(why: str) -> Note:
    """Collectives of a measured step are the copies that stand for them.

    Args:
        why: Why; empty if the GPU model is not known.
    """
    text = f"the time of collectives is that of the copies that stand for them: {why or 'this GPU model is not known'}"
    return Note("collectives_not_priced", text)


def uneven_splits(num_calls: int) -> Note:
    """Some calls of all_to_all have parts of different sizes."""
    calls = counted(num_calls, "all_to_all has", "all_to_all have")
    return Note(
        "uneven_splits",
        f"{calls} uneven splits: what this rank sends or receives counts, whichever is more; other ranks may have more "
        "(--moe-imbalance scales it)",
    )


def nccl_environment(variables: Mapping[str, str]) -> Note:
    """NCCL's variables that the times of collectives follow, by name."""
    named = ", ".join(f"{name}={value}" for name, value in variables.items())
    return Note("nccl_environment", f"the times of collectives follow {named}")


def experts_load(imbalance: float) -> Note:
    """The load of experts is not known, because the routing is made up."""
    load = "its even load (--moe-imbalance sets another)" if imbalance == 1 else f"{imbalance:g} times its even load"
    text = f"all_to_all and grouped products are estimated for a rank with {load}, as the routing is made up"
    return Note("experts_load", text)


def attention_is_dense(launches: Mapping[str, int]) -> Note:
    """flex_attention's masks have no values. Launches by kernel."""
    num_launches = sum(launches.values())
    text = (
        f"{counted(num_launches, 'launch', 'launches')} of flex_attention {'is' if num_launches == 1 else 'are'} "
        f"estimated as if every query met every key, because the values of their masks are unknown "
        f"({_named(launches)}): the interval of the step reaches down to one block of keys for each query"
    )
    return Note("attention_is_dense", text)


def not_estimated(launches: Mapping[str, int]) -> Note:
    """Launches, by kernel, whose work is not known."""
    told = counted(sum(launches.values()), "launch has", "launches have")
    return Note("not_estimated", f"{told} no estimate, because the work is unknown: {_named(launches)}")


def _named(launches: Mapping[str, int]) -> str:
    """The kernels with the most launches."""
    names = sorted(launches, key=lambda name: -launches[name])
    more = f" and {len(names) - _MOST_NAMED} others" if len(names) > _MOST_NAMED else ""
    return ", ".join(name[:80] or "unnamed" for name in names[:_MOST_NAMED]) + more


# ---- traced times


def times_are_not_a_gpus() -> Note:
    """CUPTI traced the virtual GPU."""
    text = "each kernel takes 1 µs on the virtual GPU: their order is the job's, their times are no GPU's"
    return Note("times_are_not_a_gpus", text)


def kernels_without_launch(count: int, num_all: int) -> Note:
    """Kernels whose launch was not traced."""
    text = f"{counted(count, 'kernel')} of {num_all:,} without a traced launch: of no layer"
    return Note("kernels_without_launch", text)


def kernels_of_graphs(count: int) -> Note:
    """Kernels of CUDA graphs whose capture was not traced."""
    text = f"{counted(count, 'kernel')} of CUDA graphs count for the layer that launched the graph"
    return Note("kernels_of_graphs", text)


def graphs_as_a_whole(count: int) -> Note:
    """CUDA graphs without their kernels."""
    hint = "nsys profile --cuda-graph-trace=node shows its kernels"
    return Note("graphs_as_a_whole", f"{counted(count, 'CUDA graph')} traced as a whole: one row each; {hint}")


def no_layers_traced() -> Note:
    """No range names a layer."""
    return Note("no_layers_traced", "no range of the trace names a layer: every kernel is outside of modules")


def forward_not_traced(count: int) -> Note:
    """Kernels of a backward whose forward is not in the trace."""
    text = f"{counted(count, 'kernel')} of backward without a known layer: their forward was not traced"
    return Note("forward_not_traced", text)


def no_phases_traced() -> Note:
    """No range names a phase."""
    text = "no range of the trace names forward, backward or optimizer: every kernel's phase is other"
    return Note("no_phases_traced", text)


def no_operations_traced() -> Note:
    """No range names an operation."""
    text = "no range of the trace names operations: it is not known which forwards are recomputed"
    return Note("no_operations_traced", text)


def no_steps_traced() -> Note:
    """No range of a report names a step."""
    text = "no range of the report names a step: everything in it counts as one step"
    return Note("no_steps_traced", text)


def several_processes(num_processes: int, chosen: int, others: Sequence[int]) -> Note:
    """A report has kernels of several processes."""
    text = (
        f"the report has kernels of {num_processes} processes; these are of process {chosen} "
        f"(--process {', '.join(map(str, others))})"
    )
    return Note("several_processes", text)


# ---- several ranks of a job


def exchanges_elsewhere(rank: int, others: Sequence[int]) -> Note:
    """A rank exchanges with ranks that are not priced with it."""
    named = ", ".join(map(str, others[:_MOST_NAMED])) + (", ..." if len(others) > _MOST_NAMED else "")
    which = f"rank{'s' if len(others) > 1 else ''} {named}"
    text = f"rank {rank} sends to or receives from {which}, not given here: these transfers do not wait for each other"
    return Note("exchanges_elsewhere", text)


def unmatched_calls(rank: int, number: int) -> Note:
    """Calls of a rank that the others never make."""
    have, wait = ("have", "wait") if number > 1 else ("has", "waits")
    text = f"{counted(number, 'call')} of rank {rank} with the other ranks {have} no other side in their timed steps"
    return Note("unmatched_calls", f"{text}, and {wait} for nothing")


def micro_batches_repeated(recorded: int, wanted: int) -> Note:
    """Micro-batches beyond those that were recorded are priced."""
    text = (
        f"{recorded} micro-batches were recorded, and those beyond repeat a steady one, up to {wanted}; memory is that "
        "of the recorded ones"
    )
    return Note("micro_batches_repeated", text)


def exchange_nothing(ranks: Sequence[int]) -> Note:
    """Ranks that are priced together have nothing to do with each other."""
    text = f"ranks {', '.join(map(str, ranks))} send nothing to each other: the step is that of the slowest"
    return Note("exchange_nothing", text)


def tokens_not_known(why: str) -> Note:
    """The tokens of the job's step are not known."""
    return Note("tokens_not_known", f"tokens of a step are not known: {why}; --tokens-per-step N gives them")


def flops_not_counted(why: str) -> Note:
    """The FLOPs of the job's step are not known."""
    return Note("flops_not_counted", f"no TFLOP/s and no MFU: {why}")
