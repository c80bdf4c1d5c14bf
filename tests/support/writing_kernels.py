"""Kernels of Triton that write where their own lines do not show it, each from ``x`` to ``y``."""

import triton
import triton.language as language
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def _stored(pointer: language.tensor, value: language.tensor) -> None:
    language.store(pointer, value)


@triton.jit
def _passed_on(pointer: language.tensor, value: language.tensor) -> None:
    _stored(pointer, value)


@triton.jit
def through_helpers(x: language.tensor, y: language.tensor, size: language.constexpr) -> None:
    at = language.arange(0, size)
    _passed_on(y + at, language.load(x + at))


@triton.jit(noinline=True)
def _not_inlined(pointer: language.tensor) -> None:
    language.atomic_add(pointer, 1.0)


@triton.jit
def through_a_call(x: language.tensor, y: language.tensor, size: language.constexpr) -> None:
    _not_inlined(y)
    language.store(y + size - 1, language.load(x))


@triton.jit
def through_a_tuple(both: language.tuple, size: language.constexpr) -> None:
    at = language.arange(0, size)
    language.store(both[1] + at, language.load(both[0] + at))


@triton.jit
def in_assembly(x: language.tensor, y: language.tensor, size: language.constexpr) -> None:
    at = language.arange(0, size)
    language.inline_asm_elementwise(
        "st.global.b32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [y + at, language.load(x + at)],
        dtype=language.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def in_a_loop(x: language.tensor, y: language.tensor, size: language.constexpr) -> None:
    source = x
    target = y
    for _ in range(size):
        language.atomic_xchg(target, language.load(source))
        source += 1
        target += 1


@triton.jit
def at_addresses_in_memory(addresses: language.tensor, x: language.tensor, size: language.constexpr) -> None:
    at = language.arange(0, size)
    y = language.load(addresses).to(language.pointer_type(language.float32))
    language.store(y + at, language.load(x + at))


@gluon.jit
def in_gluon(x: language.tensor, y: language.tensor, size: gl.constexpr) -> None:
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, size, layout=layout)
    gl.store(y + at, gl.load(x + at))
