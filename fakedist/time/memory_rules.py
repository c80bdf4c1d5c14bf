"""Prices kernels that are limited by memory: norms, activations, copies, embeddings, optimizers, reductions.

Each takes its bytes over the bandwidth that a measured kind of kernel reaches (:mod:`fakedist.time.moving`). The rules
say which kind stands for a kernel that was not measured, and how much slower it is taken to be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from fakedist.time.gpus import MEASURED_GPUS, measured_spec
from fakedist.time.measurements import load_measured
from fakedist.time.moving import ELEMENTWISE, WIDE_ROW, MovingTimes, measured_moves
from fakedist.time.rules import Rules
from fakedist.time.work_arrays import Estimates, WorkArrays

#: Fractions of the link between host and GPU that copies reach, and their start. Assumptions: pinned memory reaches 85
#: to 90 % of PCIe's rate in NVIDIA's bandwidthTest; pageable memory is first copied on the host.
_PINNED, _PAGEABLE, _LINK_START_US = 0.85, 0.3, 8.0
_PINNED_SPREAD, _PAGEABLE_SPREAD = 0.2, 0.7
_OTHER_GPU = 0.10


@dataclass(frozen=True)
class MemoryRule:
    """How a kernel that is limited by memory is priced.

    Attributes:
        kind: The measured kind whose bandwidth counts (``MovingTimes.kinds``).
        slower: How many times longer it takes than that kind.
        spread: Half the width of the 90 % interval (logarithm) that the rule adds.
        words: What is assumed; empty where the kind itself was measured.
    """

    kind: str
    slower: float
    spread: float
    words: str


_PLAIN = MemoryRule(ELEMENTWISE, 1.0, 0.15, "as fast as quantisation, which streams too")
_BY_FAMILY = {
    "elementwise": _PLAIN,
    "copy": MemoryRule(ELEMENTWISE, 1.0, 0.20, "as fast as quantisation, which streams too"),
    "optimizer": MemoryRule(ELEMENTWISE, 1.0, 0.20, "as fast as quantisation, which streams too"),
    "other": MemoryRule(ELEMENTWISE, 1.1, 0.30, "a reduction, 10 % slower than quantisation"),
    "gemm": MemoryRule(ELEMENTWISE, 1.2, 0.40, "moves operands, 20 % slower than quantisation"),
    "attention": MemoryRule(ELEMENTWISE, 1.2, 0.40, "prepares attention, 20 % slower than quantisation"),
}
_SOFTMAX = MemoryRule(ELEMENTWISE, 1.2, 0.30, "softmax, 20 % slower than quantisation")
_SCATTER = MemoryRule(ELEMENTWISE, 2.0, 0.70, "scattered additions, at half of quantisation's rate")
_GATHER = MemoryRule(ELEMENTWISE, 1.25, 0.40, "a gather, 25 % slower than quantisation")
_SEVERAL_PASSES = MemoryRule(ELEMENTWISE, 3.0, 0.90, "a sort or scan, as three passes")
_COMPILED_REDUCTION = MemoryRule("rms_norm.forward.compiled", 1.0, 0.25, "as fast as a compiled norm")
_WORDS = (
    (re.compile(r"sort|topk|scan|cumsum|radix|unique|nonzero", re.I), _SEVERAL_PASSES),
    (
        re.compile(r"embedding\w*backward|compute_grad_weight|krn_partial|scatter_add|index_?add|index_?put", re.I),
        _SCATTER,
    ),
    (
        re.compile(r"index_?select|(?<!all_)gather|embedding|(?<!reduce_)scatter|index_?func|index_kernel", re.I),
        _GATHER,
    ),
)
#: Releases of PyTorch differ: Liger's table has an eager RMSNorm on H100 whose backward takes twice as long.
_EAGER_NORMS = {"forward": 0.10, "backward": 0.25}
_BACKWARD = re.compile(r"backward|bwd|_grad|gammabeta|Gamma|cuComputePart|ln_bwd", re.I)


class MemoryRules(Rules):
    """Prices kernels that are limited by memory on one GPU."""

    @cached_property
    def _times(self) -> MovingTimes:
        return _moving_times(self.table.name)

    @cached_property
    def start_us(self) -> float:
        """What a kernel takes that moves nothing."""
        return self._times.start_us(ELEMENTWISE, self.gpu.memory_bandwidth)

    def load(self) -> None:
        """Load what was measured, which the first price needs."""
        _ = self._times

    def price(self, rows: WorkArrays) -> Estimates:
        """Kernels with bytes, and kernels with neither bytes nor FLOPs, which take a start."""
        found = Estimates.unknown(len(rows))
        codes, combinations = rows.combinations("family", "name", "operation")
        rules = [memory_rule(*each) for each in combinations]
        narrow = (rows.numbers("width") > 0) & (rows.numbers("width") < WIDE_ROW)
        for rule in dict.fromkeys(rules):
            with_rule = np.array([each == rule for each in rules])[codes] if len(rows) else np.zeros(0, bool)
            for is_narrow in (False, True):
                chosen = with_rule & (narrow == is_narrow)
                if chosen.any():
                    own = self._narrow(rule) if is_narrow else rule
                    found.put(chosen, self._by_rule(rows.only(chosen), own))
        return found

    def over_host_link(self, rows: WorkArrays) -> Estimates:
        """Copies between host and GPU."""
        pinned, moved = rows.flags("pinned"), rows.numbers("moved_bytes")
        rate = self.gpu.host_bandwidth * np.where(pinned, _PINNED, _PAGEABLE)
        words = np.where(
            pinned, f"assumed: {_PINNED:.0%} of the link", f"assumed: pageable, {_PAGEABLE:.0%} of the link"
        )
        return Estimates(
            _LINK_START_US + moved / rate * 1e6,
            np.where(pinned, _PINNED_SPREAD, _PAGEABLE_SPREAD),
            np.where(moved / rate * 1e6 > _LINK_START_US, "memory", "launch").astype(object),
            np.full(len(rows), "", object),
            words.astype(object),
        )

    def _by_rule(self, rows: WorkArrays, rule: MemoryRule) -> Estimates:
        moved = rows.numbers("moved_bytes")
        time_us = self._times.time_us(rule.kind, moved, self.gpu.memory_bandwidth) * rule.slower
        source = self._times.measured_on(rule.kind)
        family = "elementwise" if rule.kind == ELEMENTWISE else "norms"
        spread = np.square(self.intervals.half_width(family, time_us, gpu=source)) + rule.spread**2
        basis = f"measured: {rule.kind} on {source}"
        if not self.table.is_own or source != self.table.name:
            spread = spread + _OTHER_GPU**2
            basis += f"; assumed: {self.gpu.name} reaches the same fraction of its bandwidth"
        if rule.words:
            basis += f"; assumed: {rule.words}"
        start = self._times.start_us(rule.kind, self.gpu.memory_bandwidth) * rule.slower
        return Estimates(
            time_us,
            np.sqrt(np.where(np.isnan(moved), np.nan, spread)),
            np.where(np.isnan(moved), "", np.where(time_us > 2 * start, "memory", "launch")).astype(object),
            np.full(len(rows), family, object),
            np.where(np.isnan(moved), "", basis).astype(object),
        )

    def _narrow(self, rule: MemoryRule) -> MemoryRule:
        """The rule for narrow rows: eager norms of them have a kind of their own."""
        kind = f"{rule.kind}.narrow"
        return MemoryRule(kind, rule.slower, rule.spread, rule.words) if kind in self._times.kinds else rule


def memory_rule(family: str, name: str, operation: str) -> MemoryRule:
    """The rule for a kernel.

    Args:
        family: One of ``run.schema.FAMILIES``.
        name: The kernel's name.
        operation: The operation that launched it.
    """
    both = f"{name} {operation}"
    if family == "norm":
        return _norm_rule(name, operation)
    if family in ("copy", "other"):
        for words, rule in _WORDS:
            if words.search(both):
                return rule
    if family == "other" and re.match(r"triton_(red|per|spl)_", name):
        return _COMPILED_REDUCTION
    return _BY_FAMILY.get(family, _PLAIN)


def _norm_rule(name: str, operation: str) -> MemoryRule:
    both = f"{name} {operation}"
    if re.search(r"softmax|nll_?loss|cross_?entropy", both, re.I):
        return _SOFTMAX
    direction = "backward" if _BACKWARD.search(both) else "forward"
    # PyTorch's kernels of RMSNorm are called layer_norm, too: the operation tells.
    kind = "layer_norm" if re.search(r"layer_?norm|ln_(fwd|bwd)", operation or name, re.I) else "rms_norm"
    if name.startswith("triton_"):
        return MemoryRule(f"{kind}.{direction}.compiled", 1.0, 0.15, "")
    if re.search(r"(batch|group|instance)_?norm|\bbn_", both, re.I):
        return MemoryRule(f"layer_norm.{direction}", 1.0, 0.35, "as fast as LayerNorm")
    if re.search(r"transformer_engine|apex|liger|fused_(layer|rms)", both, re.I) and "aten" not in both:
        return MemoryRule(f"{kind}.forward.compiled", 1.0, 0.30, "a fused norm, as fast as a compiled one")
    return MemoryRule(f"{kind}.{direction}", 1.0, _EAGER_NORMS[direction], "")


@cache
def _moving_times(name: str) -> MovingTimes:
    """The memory-bound kernels of every measured GPU, those of the most similar one first."""
    own = measured_spec(name)

    def unlike(other: str) -> tuple[float, float]:
        spec = measured_spec(other)
        generation = abs(spec.compute_capability[0] - own.compute_capability[0])
        return float(generation), abs(np.log(spec.memory_bandwidth / own.memory_bandwidth))

    order = sorted(MEASURED_GPUS, key=unlike)
    return MovingTimes([measured_moves(load_measured(each), measured_spec(each)) for each in order])
