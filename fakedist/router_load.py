"""Load of experts: how many tokens each rank's routers send to each expert.

A load gives each expert of a layer a share of the choices, and each rank draws its counts from the shares. Draws follow
from the seed, the layer, the pass and the rank alone, so every rank of the job can say what every other one sends.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fakedist.options.expert_loads import EVEN, FILE_ENDING, WORKLOADS, CountsLine, RouterLoadError, lines_of

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Ranks whose counts are drawn at once.
_RANKS = 16
#: Added to the weights of a group of which no expert is picked.
_LEAST = 1e-300


class RouterPass(NamedTuple):
    """One call of a layer's router.

    Attributes:
        layer: Number of the layer, among those with routers in the order of their first calls.
        number: How often it was called before.
        step: Training steps that had ended.
        tokens: How many each rank has.
        groups: Groups that experts are in, of which a token picks ``top_groups`` first; 1: no groups.
        in_turn: Whether two operations pick a token's two experts, the second one of the others (GShard).
    """

    layer: int
    number: int
    step: int
    tokens: int
    num_experts: int
    top_k: int
    groups: int = 1
    top_groups: int = 1
    in_turn: bool = False

    @property
    def first(self) -> RouterPass:
        """The first choices alone, of those made in turn."""
        return self._replace(top_k=1, in_turn=False) if self.in_turn else self


@dataclass(frozen=True)
class RouterLoad:
    """A load as ``--router-load`` gives it: :data:`FORMS`."""

    text: str
    seed: int = 0

    @property
    def is_even(self) -> bool:
        """Whether every expert gets the same number of tokens."""
        return self.text in (EVEN, "W0")

    def shares(self, of: RouterPass) -> Floats:
        """Each expert's share of a layer's choices. None is larger than 1 / top-k: a token picks an expert once.

        Raises:
            RouterLoadError: The file is for another layer, number of experts or top-k; of a single choice, which may
                be the first of several, :meth:`check_top_k` says the latter.
        """
        return _shares(self.text, self.seed & _WORD, of)

    def counts(self, of: RouterPass, rank: int) -> Integers:
        """Tokens that a rank's router sends to each expert; as :meth:`shares`."""
        return _counts(self.text, self.seed & _WORD, of, rank)

    def experts(self, of: RouterPass, rank: int) -> Integers:
        """The experts of each token of a rank, [tokens, top-k], as many as :meth:`counts` says."""
        return _experts(self.text, self.seed & _WORD, of, rank)

    def groups(self, of: RouterPass, rank: int) -> Integers:
        """The groups of each token of a rank, [tokens, top groups], whatever the top-k."""
        return _group_choices(self.text, self.seed & _WORD, of._replace(top_k=0), rank)

    def received(self, of: RouterPass, ranks: Sequence[int]) -> Integers:
        """Tokens that each rank of a group gets for its experts: the first has the first ones, and so on."""
        sent: Integers = np.sum([self.counts(of, rank) for rank in ranks], axis=0)
        received: Integers = sent.reshape(len(ranks), -1).sum(axis=1)
        return received

    def check_top_k(self, of: RouterPass) -> None:
        """Raise RouterLoadError if the file is for another top-k."""
        if self.text.endswith(FILE_ENDING):
            _check_top_k(self.text, of, _line(self.text, of))

    def experts_in_file(self) -> int | None:
        """The number of experts of the file's first line; None without a file."""
        return len(lines_of(self.text)[0].counts) if self.text.endswith(FILE_ENDING) else None

    def layers_in_file(self) -> int | None:
        """The number of layers that the file has; None without a file."""
        return len({line.layer for line in lines_of(self.text)}) if self.text.endswith(FILE_ENDING) else None


_WORD = (1 << 64) - 1


def _shares(text: str, seed: int, of: RouterPass) -> Floats:
    return _capped(_weights(text, seed, of._replace(number=0, tokens=0)), of.top_k)


@functools.lru_cache(maxsize=4096)
def _weights(text: str, seed: int, of: RouterPass) -> Floats:
    if text.endswith(FILE_ENDING):
        return _in_file(text, of)
    name, _, parameter = text.partition(":")
    if name in WORKLOADS:
        return _of_workload(name, of)
    draws = np.random.default_rng([seed, of.layer])
    if name == "zipf":
        weights: Floats = draws.permutation(np.arange(1.0, of.num_experts + 1) ** -float(parameter))
    elif name == "lognormal":
        weights = np.exp(float(parameter) * draws.standard_normal(of.num_experts))
    else:
        weights = np.ones(of.num_experts)
    return weights


def _of_workload(name: str, of: RouterPass) -> Floats:
    experts, hot = np.arange(of.num_experts), max(of.top_k, of.num_experts // 4)
    part = 0.75  # of the tokens, which pick among the hot ones
    if name in ("W1", "W2"):
        is_hot = experts < hot
    elif name == "W3":
        spread = 2 * np.arange(max(of.top_k, of.num_experts // 2)) % of.num_experts
        is_hot = np.isin(experts, spread)
        part = 0.75 if is_hot.sum() >= of.top_k else 0.0
    elif name == "W5":
        is_hot, part = experts >= of.num_experts // 2, 1.0
    elif name == "W6":
        is_hot = (experts - of.step // 3 * hot) % of.num_experts < hot
    else:  # W0, W4, W7
        is_hot, part = experts < hot, 0.5 if name == "W7" and of.step % 4 == 3 else 0.0
    weights: Floats = part * is_hot / is_hot.sum() + (1 - part) / of.num_experts
    return weights


def _capped(weights: Floats, top_k: int) -> Floats:
    """Shares in proportion to weights, none larger than 1 / top-k."""
    shares: Floats = weights / weights.sum()
    most = 1 / top_k
    while (over := shares > most * (1 + 1e-12)).any():
        shares[over] = most
        below = shares < most
        left = 1 - shares[~below].sum()
        shares[below] = shares[below] / shares[below].sum() * left if shares[below].sum() else left / below.sum()
    return shares


def _counts(text: str, seed: int, of: RouterPass, rank: int) -> Integers:
    if of.in_turn:
        return _counts(text, seed, of.first, rank) + _second_counts(text, seed, of, rank)
    if of.groups == 1:
        counts: Integers = _counts_of_ranks(text, seed, of, rank // _RANKS)[rank % _RANKS]
        return counts
    return _counts_in_groups(text, seed, of, rank)


@functools.lru_cache(maxsize=1024)
def _counts_of_ranks(text: str, seed: int, of: RouterPass, part: int) -> Integers:
    """The counts of a part of the ranks, [ranks, experts], of ``_RANKS`` at once: making a generator takes longest."""
    draws, shares = _draws(seed, of, part), _shares(text, seed, of)
    counts: Integers = draws.multinomial(of.tokens * of.top_k, shares / shares.sum(), size=_RANKS)
    for row in np.flatnonzero((counts > of.tokens).any(axis=1)):
        counts[row] = _spread(draws, counts[row], shares, of.tokens)
    return counts


@functools.lru_cache(maxsize=4096)
def _counts_in_groups(text: str, seed: int, of: RouterPass, rank: int) -> Integers:
    draws, each = _draws(seed, of, rank), of.top_k // of.top_groups
    weights = _weights(text, seed, of._replace(number=0, tokens=0)).reshape(of.groups, -1)
    parts = zip(weights, _group_counts(text, seed, of._replace(top_k=0), rank).tolist(), strict=True)
    return np.concatenate([_drawn(draws, _capped(group + _LEAST, each), tokens, each) for group, tokens in parts])


@functools.lru_cache(maxsize=4096)
def _group_counts(text: str, seed: int, of: RouterPass, rank: int) -> Integers:
    weights = _weights(text, seed, of._replace(number=0, tokens=0)).reshape(of.groups, -1).sum(axis=1)
    return _drawn(_draws(seed, of, rank, 2), _capped(weights, of.top_groups), of.tokens, of.top_groups)


@functools.lru_cache(maxsize=4096)
def _second_counts(text: str, seed: int, of: RouterPass, rank: int) -> Integers:
    draws, shares = _draws(seed, of, rank, 4), _shares(text, seed, of)
    second = draws.multinomial(of.tokens, shares / shares.sum())
    return _spread(draws, second, shares, of.tokens - _counts(text, seed, of.first, rank))


def _draws(seed: int, of: RouterPass, rank: int, what: int = 0) -> np.random.Generator:
    return np.random.default_rng([seed, of.layer, of.number, rank, what])


def _drawn(draws: np.random.Generator, shares: Floats, tokens: int, top_k: int) -> Integers:
    """Counts by shares."""
    return _spread(draws, draws.multinomial(tokens * top_k, shares / shares.sum()), shares, tokens)


def _spread(draws: np.random.Generator, counts: Integers, shares: Floats, most: int | Integers) -> Integers:
    """Counts of which none is more than the most: what is over goes to the other experts."""
    while (excess := int((counts - most).clip(0).sum())) > 0:
        counts = counts.clip(max=most)
        free = np.where(counts < most, shares + 1e-12, 0)
        counts = counts + draws.multinomial(excess, free / free.sum())
    return counts


@functools.lru_cache(maxsize=256)
def _experts(text: str, seed: int, of: RouterPass, rank: int) -> Integers:
    if of.in_turn:
        return _with_second(text, seed, of, rank)
    counts, order = _counts(text, seed, of, rank), _draws(seed, of, rank, 1)
    if of.groups == 1:
        return _placed(order, counts, of.tokens)
    groups = _group_choices(text, seed, of._replace(top_k=0), rank)
    experts = np.empty((of.tokens, of.top_groups, of.top_k // of.top_groups), np.int64)
    for group, own in enumerate(counts.reshape(of.groups, -1)):
        token, slot = np.nonzero(groups == group)
        experts[token, slot] = group * len(own) + _placed(order, own, len(token))
    return experts.reshape(of.tokens, of.top_k)


def _with_second(text: str, seed: int, of: RouterPass, rank: int) -> Integers:
    """The first choices of tokens and the second ones, which are others."""
    first, order = _experts(text, seed, of.first, rank)[:, 0], _draws(seed, of, rank, 5)
    counts = _second_counts(text, seed, of, rank)
    second = order.permutation(np.repeat(np.arange(len(counts)), counts))
    for expert in range(len(counts)):  # those that would get it twice, with as many that have it not at all
        twice = np.flatnonzero((first == expert) & (second == expert))
        never = np.flatnonzero((first != expert) & (second != expert))[: len(twice)]
        second[twice], second[never] = second[never], expert
    return np.stack([first, second], axis=1)


@functools.lru_cache(maxsize=256)
def _group_choices(text: str, seed: int, of: RouterPass, rank: int) -> Integers:
    return _placed(_draws(seed, of, rank, 3), _group_counts(text, seed, of, rank), of.tokens)


def _placed(order: np.random.Generator, counts: Integers, tokens: int) -> Integers:
    """Give each token as many different experts as it picks: an expert's tokens follow each other, over the end."""
    shuffled = order.permutation(len(counts))
    slots = np.repeat(shuffled, counts[shuffled]).reshape(-1, max(tokens, 1))[:, :tokens]
    return np.ascontiguousarray(slots.T)


# ---- files


def _in_file(text: str, of: RouterPass) -> Floats:
    line = _line(text, of)
    if len(line.counts) != of.num_experts:
        raise RouterLoadError(
            f"{text} counts {len(line.counts)} experts in layer {line.layer}, and the job has {of.num_experts}"
        )
    if of.top_k > 1:
        _check_top_k(text, of, line)
    return np.array(line.counts, np.float64)


def _check_top_k(text: str, of: RouterPass, line: CountsLine) -> None:
    if line.top_k != of.top_k:
        raise RouterLoadError(f"{text} is for top-{line.top_k} in layer {line.layer}, and the job picks top-{of.top_k}")


def _line(text: str, of: RouterPass) -> CountsLine:
    lines = lines_of(text)
    layers = sorted({line.layer for line in lines})
    if of.layer >= len(layers):
        raise RouterLoadError(f"{text} has {len(layers)} layers of experts, and the rank runs {of.layer + 1} or more")
    steps = [line for line in lines if line.layer == layers[of.layer]]
    return steps[of.step % len(steps)]
