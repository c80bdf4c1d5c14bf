"""Whether the calls of a job's ranks match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fakedist.analysis.call_order import ELEMENTS, Disagreement
from fakedist.report.content.report_blocks import Block, Fact, Facts, Items, Remark, Report, Verdict
from fakedist.results.job_ranks import JobMatch, Place
from fakedist.rundir.notes import counted
from fakedist.units import format_bytes, format_rank_list

_MOST_LINES = 3
_MOST_WAITING = 8
_MOST_UNPROVED = 3
_MOST_PARTS = 4


def match_report(match: JobMatch) -> Report:
    """Whether the calls match: the verdict, the ranks, the calls that meet or wait, and limits of the verdict."""
    text = verdict(match)
    blocks: list[Block] = [Verdict(text[0].upper() + text[1:], "match"), _facts(match)]
    blocks += [Items(title, items) for title, items in sections(match)]
    return Report("match", [*blocks, *map(Remark, _remarks(match))], partial(_match_object, match))


def _match_object(match: JobMatch) -> dict[str, object]:
    matched = match.matched
    return {
        "matched": matched.is_matched,
        "ranks": match.ranks,
        "alike": {str(copy): rank for copy, rank in match.copies.items()},
        "not_recorded": format_rank_list(match.not_recorded),
        "num_steps": match.num_steps,
        "num_calls": matched.num_calls,
        "difference": None if matched.difference is None else _difference_object(match, matched.difference),
        "waiting": [
            {**_place_object(match.placed(wait.made)), "for_ranks": list(wait.missing)} for wait in matched.waiting
        ],
        "groups": {str(rank): text for rank, text in matched.groups.items()},
        "not_proved": [_difference_object(match, one) for one in matched.unproved],
        "failed": {str(rank): outcome for rank, outcome in match.failed.items()},
        "unknown_waits": match.num_unknown_waits,
        "waits_between_streams": "left out" if match.has_streams else "none",
        "not_over": [_place_object(match.placed(made)) for made in match.in_flight],
        "made_up_values": {str(rank): number for rank, number in match.decided.items()},
    }


def verdict(match: JobMatch) -> str:
    """One line: whether the calls match, and what was left out of it."""
    matched = match.matched
    if matched.difference is not None:
        ranks = _ranks([made.rank for made in matched.difference.calls])
        return f"calls of {ranks} do not match: they differ in {matched.difference.what}"
    if matched.waiting:
        return f"the job hangs: {_ranks(sorted(wait.made.rank for wait in matched.waiting))} would wait forever"
    if matched.groups:
        return f"the job hangs: {_ranks(sorted(matched.groups))} do not make the same process groups in the same order"
    agreement = f"the calls of {counted(len(match.ranks), 'rank')} match"
    if match.in_flight:
        hanging = _ranks([made.rank for made in match.in_flight])
        return f"{agreement}, and {hanging} hang{'s' if len(match.in_flight) == 1 else ''}"
    left_out = _left_out(match)
    return agreement + (f", {left_out} left out" if left_out else "")


def _left_out(match: JobMatch) -> str:
    """Waits that a hang may need and that were not played."""
    number = match.num_unknown_waits
    texts = [f"waits for {number:,} asynchronous call{'s' if number > 1 else ''}"] if number else []
    return " and ".join([*texts, *(["waits between streams"] if match.has_streams else [])])


def _facts(match: JobMatch) -> Facts:
    ranks = f"{format_rank_list(match.ranks)} of {match.world_size:,}"
    if match.copies:
        ranks += f", and {len(match.copies):,} that are of the same kinds"
    until = "to the end of their scripts" if match.num_steps is None else f"until step {match.num_steps}"
    until = "as far as all dumps have them" if match.is_hang else until
    calls = f"{match.matched.num_calls:,} completed, played {until}"
    return Facts([Fact("ranks", ranks), Fact("calls", calls)])


def sections(match: JobMatch) -> list[tuple[str, list[str]]]:
    """Lists, each below its title."""
    matched = match.matched
    found = []
    if (difference := matched.difference) is not None:
        found.append(("These calls meet", _different(match, difference)))
    if matched.groups:
        found.append(("Their next groups", _by_ranks(matched.groups)))
    if matched.waiting:
        rows = [
            f"rank {wait.made.rank}: {_call_text(match.placed(wait.made))}; waits for {_ranks(wait.missing)}"
            for wait in matched.waiting[:_MOST_WAITING]
        ]
        if len(matched.waiting) > _MOST_WAITING:
            rows.append(f"and {len(matched.waiting) - _MOST_WAITING} more ranks (--json has them)")
        found.append(("They wait in", rows))
    if match.in_flight and matched.is_matched:
        rows = [f"rank {made.rank}: {_call_text(match.placed(made))}" for made in match.in_flight[:_MOST_WAITING]]
        absent = {rank for made in match.in_flight for rank in made.call.members}.intersection(match.not_recorded)
        why = (
            f": {_ranks(sorted(absent))} may never have made them, or"
            if absent
            else ", although every rank is in them:"
        )
        found.append((f"Not over{why} a GPU, the network or a host holds them up", rows))
    if matched.unproved:
        rows = [" meets ".join(_different(match, one)) for one in matched.unproved[:_MOST_UNPROVED]]
        title = (
            f"Not proved: {len(matched.unproved):,} exchanges of uneven parts, whose sizes follow from what others sent"
        )
        found.append((title, rows))
    return found


def _remarks(match: JobMatch) -> list[str]:
    texts = []
    if others := match.not_recorded:
        lack = "without a dump" if match.is_hang else "not recorded"
        texts.append(f"{lack}, and assumed to make the matching calls: {_ranks(others)}")
    if match.failed:
        ranks = ", ".join(f"{rank} ({outcome})" for rank, outcome in match.failed.items())
        texts.append(f"not proved: these ranks failed, and are compared until then: {ranks}")
    if left_out := _left_out(match):
        texts.append(f"not proved: that no rank hangs in {left_out}: those by futures and events are not recorded")
    if match.decided:
        total = sum(match.decided.values())
        texts.append(
            f"not proved: branches that depend on {total:,} made-up values, which scripts read: "
            f"{_ranks(list(match.decided))}"
        )
    return texts


def _different(match: JobMatch, difference: Disagreement) -> list[str]:
    """The calls, one text for those of several ranks that are alike."""
    return _by_ranks({made.rank: _call_text(match.placed(made)) for made in difference.calls})


def _by_ranks(texts: Mapping[int, str]) -> list[str]:
    """The texts of ranks, one for several that are alike."""
    ranks_of = {text: [rank for rank, other in texts.items() if other == text] for text in texts.values()}
    return [f"{_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_rank_list(ranks)}"


def _call_text(place: Place) -> str:
    call = place.made.call
    size = max(call.bytes_in, call.bytes_out)
    text = " ".join(filter(None, (call.operation, call.reduction, call.dtype, format_bytes(size) if size else "")))
    if call.dtype == ELEMENTS:
        text = f"{call.operation} {size:,} {ELEMENTS}"
    if call.parts:
        text += f" in parts of {_parts_text(call.sizes)}"
    if call.peer >= 0:
        text += f" {'to' if call.kind == 'send' else 'from'} rank {call.peer}"
    if call.root >= 0:
        text += f", root rank {call.members[call.root]}"
    when = [*([f"step {call.step}"] if call.step else []), *([place.phase] if place.phase != "other" else [])]
    text += f", group {place.group}" + "".join(f", {word}" for word in when)
    text += f", layer {place.layer}" if place.layer else ""
    return text + (f", at {' < '.join(place.lines[:_MOST_LINES])}" if place.lines else "")


def _parts_text(parts: Sequence[tuple[str, int]]) -> str:
    """The first parts of a call, of each its bytes; with dtypes if they differ."""
    if parts[0][0] == "objects":
        return f"{parts[0][1]} objects"
    is_mixed = len({dtype for dtype, _ in parts}) > 1
    texts = [f"{dtype} {format_bytes(size)}" if is_mixed else format_bytes(size) for dtype, size in parts]
    more = [f"{len(texts) - _MOST_PARTS} more"] if len(texts) > _MOST_PARTS else []
    return ", ".join([*texts[:_MOST_PARTS], *more])


def _difference_object(match: JobMatch, difference: Disagreement) -> dict[str, object]:
    return {"what": difference.what, "calls": [_place_object(match.placed(made)) for made in difference.calls]}


def _place_object(place: Place) -> dict[str, object]:
    call = place.made.call
    return {
        "rank": place.made.rank,
        "sequence": call.sequence,
        "operation": call.operation,
        "group": place.group,
        "bytes_in": call.bytes_in,
        "bytes_out": call.bytes_out,
        "dtype": call.dtype,
        "reduction": call.reduction,
        "parts": [f"{dtype} {size}" for dtype, size in call.sizes],
        "root": call.root,
        "peer": call.peer,
        "step": call.step,
        "phase": place.phase,
        "layer": place.layer,
        "lines": place.lines,
    }
