"""Notes of the report: what limits what its figures mean. Every note's text is composed here.

A function decorated with :func:`note` or :func:`warning` makes one note, whose code is the function's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

from fakedist.options.expert_loads import EVEN
from fakedist.rundir.host_memory import NodeMemory
from fakedist.units import format_bytes, format_us

_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True, slots=True)
class Note:
    """Something that limits what the figures mean.

    Attributes:
        code: Which note it is; stays the same when its words change.
        text: The note, one sentence.
    """

    code: str
    text: str


def note(text: Callable[_Arguments, str]) -> Callable[_Arguments, Note]:
    """Make a note of the text that a function returns. The function's name is the note's code."""

    @wraps(text)
    def made(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Note:
        return Note(text.__name__, text(*args, **kwargs))

    return made


#: The notes which say that a figure is made up, missing or may be wrong: the gravity of each by its code.
GRAVITIES: dict[str, int] = {}


def warning(gravity: int) -> Callable[[Callable[_Arguments, str]], Callable[_Arguments, Note]]:
    """Like :func:`note`, of a note which says that a figure is made up, missing or may be wrong; 10 is gravest."""

    def decorate(text: Callable[_Arguments, str]) -> Callable[_Arguments, Note]:
        GRAVITIES[text.__name__] = gravity
        return note(text)

    return decorate


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun: "1 call", "1,200 calls"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def listed(items: Sequence[str]) -> str:
    """Items as a list in a sentence: "a", "a and b", "a, b and c"; "a, and b and c" if an item has a comma or "and"."""
    if len(items) < 2:
        return "".join(items)
    is_plain = not any(" and " in item or "," in item for item in items)
    return f"{', '.join(items[:-1])}{' and' if is_plain else ', and'} {items[-1]}"


def share_text(share: float) -> str:
    """A share in percent. Only all is "100%", and only nothing "0%"."""
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"


# ---- the script's process


@note
def torch_not_imported() -> str:
    """The script never imported torch."""
    return "the script never imported torch: there is nothing to report"


@note
def torch_import_not_seen() -> str:
    """The script imported torch without Python's import system."""
    return "the script imported torch past Python's import system: nothing that it did was recorded"


@note
def started_again(difference: str) -> str:
    """The rank forked from a server at first."""
    return (
        f"{difference} was not as in the first rank, whose imports the fork server has, so the rank was started again "
        "on its own"
    )


@note
def history_requests_ignored() -> str:
    """The script asked torch for a memory history of its own."""
    return "the script's own calls of _record_memory_history were ignored: fakedist records the history itself"


@warning(110)
def values_off() -> str:
    """The script failed, and nothing was computed."""
    return (
        "with --values off nothing is computed, and the script reads zeros from the GPU, which may have caused its "
        "error; without --values off small tensors are computed"
    )


@note
def profiler_saw_virtual_gpu(launches: int) -> str:
    """The script's own profiler ran."""
    return (
        f"the script's profiler saw {counted(launches, 'launch', 'launches')} of the virtual GPU: their names, streams "
        "and order are the "
        "job's, their times are not a GPU's (each takes 1 µs); operations on small tensors, which the host computes, "
        "launch none"
    )


@note
def nsys_failed(why: str, more: str) -> str:
    """The report of ``--nsys`` could not be joined; ``more`` says what is left of it."""
    return f"no kernels from nsys: {why}{more}"


# ---- steps


@warning(440)
def not_steady(difference: str) -> str:
    """``--steps auto`` reached its limit before two steps ended alike."""
    return f"not steady: {difference}: --steps 10"


@note
def data_loader(line: str, dataset: str, num_workers: int, wait_us: float, num_batches: int) -> str:
    """A DataLoader feeds the steps. The estimated step does not wait for it.

    Args:
        line: Where the script takes its batches; empty if unknown.
        dataset: Class of its dataset.
        num_workers: Its worker processes; 0 loads in the rank's own.
        wait_us: Median time that a batch took.
        num_batches: Batches in that median.
    """
    where = f" at {line}" if line else ""
    workers = counted(num_workers, "worker process", "worker processes") if num_workers else "no worker processes"
    return (
        f"a DataLoader feeds the steps{where}: {dataset}, {workers}. The script waits {format_us(wait_us)} for a "
        f"batch, measured on this machine, recording included (median of {num_batches}). The estimated step takes each "
        "batch as ready"
    )


@note
def stop_swallowed(num_times: int) -> str:
    """The script caught what stops it, and went on."""
    times = "once" if num_times == 1 else f"{num_times} times"
    return (
        f"the script caught the stop {times} and went on, as a bare `except:` does; `except Exception:` lets it pass, "
        "and --until end runs the script to its own end"
    )


@note
def stopped_before_the_end(num_steps: int, until: str, missing: Sequence[str]) -> str:
    """The script was stopped after its last step, or by ``until``, before the parts ``missing``."""
    steps = counted(num_steps, "step")
    after = {"validation": "after its first validation", "save": "after its first checkpoint"}.get(until, "")
    parts = listed([*missing, "what else follows" if missing else "what follows"])
    where = f"{after}, with {steps} recorded" if after else f"after {steps}"
    return f"the script was stopped {where}; not recorded: {parts} (--until end records the whole script)"


@note
def rollout_in_first_step(num_forwards: int) -> str:
    """A model that trains ran without gradients in the first step, and not in others."""
    return (
        f"{num_forwards} forwards without gradients ran in step 1 and none in later steps, whose time leaves them out: "
        "where several optimizer steps train on one rollout, --updates-per-step N makes them one step"
    )


@note
def no_optimizer_step() -> str:
    """The script ended by itself, and nothing marked its steps."""
    return (
        "no training step: no optimizer stepped; the figures are of all that the script did, and fakedist.step() at "
        "the end of each iteration of its loop (inference, evaluation) counts them as steps"
    )


@note
def left_during_init(line: str) -> str:
    """The rank ended before its first step, at a line or, if that is empty, at the script's end."""
    text = "no training step: no module ran and no optimizer stepped; the figures are of all that the script did"
    if line:
        text = "this rank left the job during init, before a first step: the figures are those of its init alone"
    return text


@note
def no_forward() -> str:
    """No module ran a forward."""
    return (
        "no forward ran, and only a forward tells which memory is of parameters and of which layer: all of it counts "
        "as other, outside of modules"
    )


# ---- the recording


@warning(10)
def no_last_record() -> str:
    """The rank was killed."""
    return "the rank ended without its last record: what it did in its last two seconds may be missing"


@warning(20)
def recording_cut() -> str:
    """The journal ends in the middle of a record."""
    return "the recording ends in the middle of a record, which is left out"


@note
def trace_bars_left_out(num: int, num_all: int) -> str:
    """trace.json.gz has too many slices of layers."""
    return f"trace.json.gz leaves out the {num:,} shortest of {num_all:,} slices of its track of layers"


@note
def trace_kernels_merged(num_kernels: int, num_bars: int) -> str:
    """trace.json.gz has too many kernels."""
    return f"trace.json.gz shows the {num_kernels:,} kernels of its streams as {num_bars:,} bars: neighbours are merged"


# ---- memory


@warning(50)
def allocated_before(num_blocks: int) -> str:
    """Blocks were freed whose allocation was not recorded."""
    were = "1 block was" if num_blocks == 1 else f"{num_blocks} blocks were"
    return f"{were} allocated before the recording began and not counted"


@warning(40)
def peak_differs(name: str, bytes_: int, own_bytes: int) -> str:
    """A replayed peak differs from the allocator's own."""
    difference = f"differs from the allocator's own statistics by {bytes_ - own_bytes} bytes"
    return f"the {name} peak of {bytes_} bytes {difference}"


@warning(100)
def went_on_without_memory(times: int, requested_bytes: int, line: str) -> str:
    """The script caught an out-of-memory error."""
    often = "once" if times == 1 else f"{times} times, last"
    return (
        f"the GPU's memory was too little {often} for {format_bytes(requested_bytes)}{f' at {line}' if line else ''}, "
        "and the script handled the error: the peak is what it was given, not what it asked for (--gpu-memory "
        "unlimited gives it all)"
    )


@warning(60)
def used_other_devices(others: Sequence[int], device: int) -> str:
    """The rank used several devices."""
    named = ", ".join(f"cuda:{other}" for other in others)
    return f"the rank also used {named}; the tables are about cuda:{device}"


@warning(70)
def used_another_device(device: int) -> str:
    """The rank used one device, but not its own."""
    return f"the rank used cuda:{device}, not the device of its LOCAL_RANK"


# ---- made-up values


@warning(280)
def values_made_up(num_values: int, line: str) -> str:
    """The script read values that no kernel computed."""
    return (
        f"{counted(num_values, 'value')} that the script read {'was' if num_values == 1 else 'were'} made up, first at "
        f"{line or 'a backward'}, because no kernel "
        "had computed them (table invented): decisions that depend on them may differ on a real GPU"
    )


@note
def values_unused(num_values: int, line: str) -> str:
    """The script read values that no kernel computed, and decides nothing by them."""
    were, them = ("was", "it") if num_values == 1 else ("were", "them")
    return (
        f"{counted(num_values, 'value')} that the script read {were} made up, first at {line or 'a backward'}, and no "
        f"figure depends on {them}: the script logs, keeps or asserts {them} (table invented)"
    )


@warning(300)
def event_times_made_up(num_times: int, line: str) -> str:
    """The script read times between CUDA events, which the virtual GPU does not have."""
    return (
        f"{counted(num_times, 'time')} between CUDA events that the script read, first at {line or 'a backward'}, "
        f"{'is' if num_times == 1 else 'are'} this machine's, not a GPU's: the step's time below is the estimate"
    )


@warning(270)
def indices_made_up(operation: str, line: str) -> str:
    """An operation such as ``topk`` chose by made-up values, first at ``line`` (empty in a backward)."""
    return f"{_made_up_choice(operation, line)}: each index equally often"


@warning(260)
def experts_made_up(operation: str, line: str, router: str, load: str = EVEN) -> str:
    """As :func:`indices_made_up`, and ``router`` is where a router did so by a load; empty in a backward."""
    there = "" if router == line else f" at {router or 'a backward'}"
    if load != EVEN:
        return (
            f"{_made_up_choice(operation, line)}; the router's tokens{there} go to its experts by --router-load {load}"
        )
    spread = f", so that the router's tokens{there} are spread evenly over its experts, which is optimistic"
    return f"{_made_up_choice(operation, line)}: each index equally often{spread} (--router-load draws uneven loads)"


@warning(250)
def experts_load_drawn(load: str, num_ranks: int, own: float, hottest: int, most: float) -> str:
    """Name the rank that received most by a load; shares in times the mean of the group."""
    if own == most:
        return (
            f"by --router-load {load}, the experts of this rank got the most tokens of {num_ranks} ranks: {own:.2f} x "
            "the mean"
        )
    return (
        f"by --router-load {load}, this rank's experts got {own:.2f} x the mean of {num_ranks} ranks' tokens; those of "
        f"rank {hottest} got the most, {most:.2f} x (--rank {hottest} runs it)"
    )


@warning(230)
def router_load_unused(load: str) -> str:
    """A load was given, and no router picked experts by made-up values."""
    return (
        f"--router-load {load} made no difference: no router picked experts by values that no kernel had computed "
        "(forced balancing picks by random numbers)"
    )


@warning(240)
def router_not_reached(load: str, line: str) -> str:
    """A router that picks experts in a kernel, or by values that are known."""
    return f"--router-load {load} does not reach the router at {line}: its experts get even loads"


def _made_up_choice(operation: str, line: str) -> str:
    return f"{operation}, first at {line or 'a backward'}, chose by values that no kernel had computed"


@warning(130)
def branches_made_up(lines: Sequence[str], num_more: int, loops: Sequence[str], loop_limit: int) -> str:
    """The script decided by made-up values.

    Args:
        lines: Lines where it did, each with how often.
        num_more: Number of other such lines.
        loops: Lines of loops that were ended.
        loop_limit: Made-up values after which a loop is ended.
    """
    more = f" and {num_more} more lines" if num_more else ""
    ended = f"; a loop did not end after {loop_limit:,} made-up values and was ended ({', '.join(loops)})"
    return (
        f"the script read truth values or numbers computed from made-up values at {', '.join(lines)}{more}: "
        f"on a real GPU it may take another branch{ended if loops else ''}"
    )


@note
def assertions_hold(lines: Sequence[str], num_more: int) -> str:
    """The script tested made-up values where another answer would have ended it.

    Args:
        lines: Lines where it did, each with how often.
        num_more: Number of other such lines.
    """
    more = f" and {num_more} more lines" if num_more else ""
    return f"assertions on made-up values hold, as in a healthy job: {', '.join(lines)}{more}"


@note
def host_not_computed(num_operations: int, line: str) -> str:
    """Operations on large host tensors were skipped; ``line`` is empty if the first was in a backward."""
    return (
        f"{counted(num_operations, 'operation')} on host tensors of more than 4 MiB "
        f"{'was' if num_operations == 1 else 'were'} not computed, first "
        f"{f'at {line}' if line else 'in a backward'}: large floats have no values, neither on the virtual GPU nor, "
        "with it, on the host"
    )


@note
def saved_with_holes(bytes_: int) -> str:
    """The script saved tensors without values."""
    return f"{format_bytes(bytes_)} of tensors without values were saved as holes in files"


# ---- the other ranks

#: The most lines that the note on what was not sent names.
_MOST_LINES = 4
_USE_TAPES = "to receive what those ranks send, use their tapes: --rank with several ranks, or --tape"


@warning(190)
def objects_made_up(count: int, first: str) -> str:
    """This rank's own objects stood in for other ranks'."""
    return f"this rank's own objects stood in for {counted(count, 'object')} from other ranks, {first}; {_USE_TAPES}"


@warning(220)
def tensors_made_up(count: int, num_zeros: int, first: str) -> str:
    """Received tensors were filled with random floats or zeros."""
    zeros = f" ({num_zeros:,} of integers or flags, as zeros)" if num_zeros else ""
    made_up = f"{counted(count, 'tensor')} from other ranks {'was' if count == 1 else 'were'} made up"
    return f"{made_up}{zeros}, {first}; {_USE_TAPES}"


@warning(180)
def not_sent(lines: Sequence[str], command: str, *, is_cause: bool) -> str:
    """The script read integers or flags that another rank should have sent.

    Args:
        lines: Calls with the rank that sends and the line that reads.
        command: The command that supplies them; may be empty.
        is_cause: Whether the script ended before a training step.
    """
    more = f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    text = (
        "the script read integers or flags that another rank should have sent: "
        f"{', '.join(lines[:_MOST_LINES])}{more}. They were what this rank held itself, or zeros"
    )
    text += ", which may be why it trained nothing" if is_cause else ""
    return f"{text}. To receive them: {command}" if command else text


@note
def tape_answered(count: int, tape: str) -> str:
    """Calls were answered from a tape."""
    return f"{counted(count, 'call was', 'calls were')} answered from {tape}"


@warning(200)
def tape_without_values(count: int, tape: str) -> str:
    """A tape has the sizes of what was sent, and not its values."""
    calls = counted(count, "call has", "calls have")
    return f"{calls} made-up values: {tape} has only their sizes"


@warning(210)
def tape_too_short(count: int, tape: str) -> str:
    """A tape does not have what this rank received."""
    return f"{counted(count, 'call is', 'calls are')} not on {tape}: their values are made up"


@note
def tape_full(max_bytes: int, count: int) -> str:
    """This rank sent more than a tape holds."""
    return f"the tape holds at most {format_bytes(max_bytes)} of values: {count:,} later sends were recorded without"


@warning(80)
def joined_as_another(rank: int, num_ranks: int, job_rank: int, world_size: int) -> str:
    """The script initialised torch.distributed with another rank or world size."""
    return f"the script joined the job as rank {rank} of {num_ranks}, not as rank {job_rank} of {world_size}"


@warning(90)
def rank_not_started(num_started: int, rank: int, world_size: int) -> str:
    """The script starts its ranks itself, and not this one."""
    return (
        f"the script started {num_started} ranks itself, but none of them is rank {rank} of {world_size}: nothing of "
        "that rank ran"
    )


@warning(320)
def deep_ep_stands_in(buffer: str, commit: str) -> str:
    """The script used DeepEP or HybridEP, or Megatron-LM's flex dispatcher with one of them."""
    estimated = "NVSHMEM's heap is estimated" if buffer == "Buffer" else "queue pairs of several nodes are estimated"
    return (
        f"deep_ep.{buffer} is a stand-in that follows deepseek-ai/DeepEP @{commit[:8]}: it takes the same buffers and "
        "returns tensors of the same sizes, but each rank is taken to send to this rank's experts as many tokens as "
        f"this rank does; {estimated}"
    )


@warning(120)
def collectives_off() -> str:
    """``--collectives noop``."""
    return "collectives moved nothing (--collectives noop): values are whatever memory held"


# ---- the virtual GPU


@warning(25)
def records_unknown(kinds: Sequence[str]) -> str:
    """The journal has records of kinds that this version, or an extra that is missing, would read."""
    return f"the recording has records that this fakedist does not know, which are left out: {listed(kinds)}"


@warning(30)
def not_answered(function: str, num_calls: int) -> str:
    """The virtual GPU refused a CUDA function."""
    calls = counted(num_calls, "call")
    return f"{function} is not answered by the virtual GPU ({calls}): results after it may be wrong"


@warning(140)
def streams_keep_least(lines: Sequence[tuple[str, int, int]]) -> str:
    """The allocator kept blocks for streams (``lines``: with blocks and bytes of a step, most first): not for long."""
    return (
        f"{_kept_by_streams(lines)}. Here streams are done at once, so what is reserved is a lower bound for a real "
        "GPU (--gpu-lag full gives an upper one)"
    )


@warning(160)
def streams_keep_most(lines: Sequence[tuple[str, int, int]]) -> str:
    """The same, by ``--gpu-lag full``: as long as possible."""
    cure = "Instead of record_stream, the stream that allocates can wait for the other one before the tensor is freed"
    if "distributed/fsdp/_" in lines[0][0]:
        cure = "FSDP1's limit_all_gathers=True bounds it, and FSDP2 uses no record_stream"
    return (
        f"{_kept_by_streams(lines)}. With --gpu-lag full streams are done as late as they can be, so what is reserved "
        f"is an upper bound for a real GPU (--gpu-lag none gives a lower one). {cure}"
    )


@warning(170)
def node_memory_short(node: NodeMemory) -> str:
    """The node's host has less memory than its ranks need."""
    at_least = "at least" if node.low_bytes > (node.limit_bytes or 0) else "up to"
    needs = node.low_bytes if at_least == "at least" else node.high_bytes
    step, phase = (node.low_step, node.low_phase) if at_least == "at least" else (node.step, node.phase)
    return (
        f"a node of {counted(node.num_ranks, 'rank')} needs {at_least} {format_bytes(needs)} of host memory in step "
        f"{step}, {phase}, and has {format_bytes(node.limit_bytes or 0)} (--host-memory): the host would kill the job"
    )


@note
def host_memory_not_recorded() -> str:
    """Nothing watches the CPU allocator."""
    return "the host's memory was not recorded: that needs a C++ compiler and torch's own CPU allocator"


def _kept_by_streams(lines: Sequence[tuple[str, int, int]]) -> str:
    (line, blocks, num_bytes), *others = lines
    more = sum(row[1] for row in others), sum(row[2] for row in others)
    elsewhere = f" (at other lines {more[0]:,} of {format_bytes(more[1])})" if more[0] else ""
    return (
        f"record_stream keeps {counted(blocks, 'block')} of {format_bytes(num_bytes)} a step at {line}{elsewhere} "
        "until another stream is done with what they hold"
    )


@note
def sensors_constant(readings: Mapping[str, int]) -> str:
    """NVML was asked for sensors, by kind, that the virtual GPU lacks."""
    return (
        f"{sum(readings.values()):,} NVML readings ({', '.join(readings)}) returned constants of an idle GPU, not "
        "measurements"
    )


@warning(310)
def work_areas_estimated(largest_bytes: Mapping[str, int]) -> str:
    """Libraries were asked how much memory they work in, which needs a GPU: the largest answers by function."""
    largest = max(largest_bytes, key=lambda name: largest_bytes[name])
    others = counted(len(largest_bytes) - 1, "other function")
    more = f" and {others}" if len(largest_bytes) > 1 else ""
    return (
        f"the sizes of work areas are estimated for {largest}{more}, at most {format_bytes(largest_bytes[largest])} "
        "each: the libraries do not publish them, so a peak that includes one may differ on a real GPU"
    )


@note
def memory_managed(num_bytes: int) -> str:
    """CUDA managed memory was allocated, which moves between host and GPU: the states of paged optimizers."""
    return (
        f"{format_bytes(num_bytes)} of managed memory (cudaMallocManaged) were allocated in all, outside the caching "
        "allocator: the time in which their pages move is not estimated"
    )


@note
def started_out_of_memory(
    process: str, *, line: str, asked_bytes: int, own_bytes: int, others_bytes: int, total_bytes: int
) -> str:
    """A process that the script started, ``process`` by its name and number, was out of memory."""
    asked = f"{format_bytes(asked_bytes)} at {line}" if line else format_bytes(asked_bytes)
    return (
        f"a process that the script started, {process}, was out of memory: it asked for {asked} when it held "
        f"{format_bytes(own_bytes)}, and the rank's other processes {format_bytes(others_bytes)}, of the GPU's "
        f"{format_bytes(total_bytes)}"
    )


@note
def engine_made_up(process: str) -> str:
    """An inference engine ran in a process that the script started."""
    return (
        f"what {process} generated is made up, because its weights hold no values; made-up values that it sent to the "
        "script are not counted"
    )


@warning(290)
def read_in_other_threads(reads: int, num_bytes: int) -> str:
    """Threads that Python does not know copied device memory to the host that held no values."""
    times = "once" if reads == 1 else f"{reads:,} times"
    return (
        f"threads that are not Python's copied memory to the host {times} ({num_bytes:,} bytes) that no kernel had "
        "computed: they got zeros"
    )


@note
def smi_constant(num_calls: int) -> str:
    """The virtual GPU's ``nvidia-smi`` ran."""
    times = "once" if num_calls == 1 else f"{num_calls:,} times"
    return f"nvidia-smi was called {times}: its answers are constants of an idle GPU with all memory free"


@note
def smi_refused(num_calls: int, first: str) -> str:
    """``nvidia-smi`` refused calls."""
    return f"nvidia-smi refused {counted(num_calls, 'call')}, first {first}"


@note
def nothing_tuned(choices: Mapping[str, int]) -> str:
    """Kernels were not tuned; ``choices`` counts by kind those that would have been."""
    kinds = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(choices.items()))
    return (
        f"nothing was tuned ({kinds}): kernels do not run on the virtual GPU, so the first configuration was taken; "
        "before its first step a real job also allocates and frees memory for tuning (copies of the arguments that a "
        "kernel changes, a buffer the size of the L2 cache), and a template that beats cuBLAS may keep fewer buffers"
    )


@note
def snapshot_starts_late(num_blocks: int, bytes_: int) -> str:
    """The snapshot's history is cut at its beginning."""
    were = "1 block was" if num_blocks == 1 else f"{num_blocks:,} blocks were"
    return (
        f"{were} alive before the history begins ({format_bytes(bytes_)}): shown at its beginning, in sizes rounded to "
        "512 bytes; a peak before that is not in the snapshot"
    )


@note
def snapshot_action_unknown(name: str, count: int) -> str:
    """The snapshot has entries of an unknown kind."""
    return f"entries of the unknown action {name!r} were left out: {count}"


@note
def snapshot_of_several_devices(device: int, others: Sequence[int]) -> str:
    """The snapshot has the history of other devices too."""
    named = ", ".join(f"cuda:{other}" for other in others)
    return f"this is cuda:{device}; the snapshot also has a history of {named}"


@note
def snapshot_without_history(skipped: str = "") -> str:
    """The snapshot has segments alone, or a history without allocations or frees."""
    if skipped:
        return f"the snapshot's history has no {skipped} (skip_actions left them out): its end is shown"
    return "the snapshot has no history (torch.cuda.memory._record_memory_history was off): its end is shown"


@note
def snapshot_without_segments() -> str:
    """The snapshot has no segments, although its history leaves blocks."""
    return (
        "the snapshot has no segments: reserved memory is that of the segments which its history makes, and blocks "
        "that were there before it and stayed are missing"
    )


@warning(5)
def snapshot_ran_out(num_times: int, bytes_: int, free_bytes: int, line: str) -> str:
    """The history of a snapshot has requests that the GPU could not serve; the last one's facts."""
    at = f" at {line}" if line else ""
    return (
        f"out of memory {counted(num_times, 'time')}, last when {format_bytes(bytes_)} were requested{at}, with "
        f"{format_bytes(free_bytes)} of the GPU free"
    )


@note
def snapshot_without_layers(has_stacks: bool) -> str:
    """The stacks of a snapshot tell neither layers nor steps."""
    if not has_stacks:
        return (
            "lines, layers, phases and categories are not known: the snapshot has no stacks, which "
            'torch.cuda.memory._record_memory_history(stacks="python") records'
        )
    return (
        "layers, phases and categories are not known: no stack of the snapshot is in a forward, a backward or an "
        "optimizer's step"
    )


@note
def snapshot_inferred(is_native: bool) -> str:
    """Phases, steps, layers and categories of a snapshot follow from its stacks."""
    text = (
        "phases, steps, layers and categories are inferred: from stacks, from what stays alive, and from sizes; layers "
        "are named after the lines that call them"
    )
    blank = "; stacks have no frames of C++, so what has no stack between a forward and the next is taken for backward"
    return text if is_native else text + blank
