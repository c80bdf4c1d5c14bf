import ctypes
from array import array
from types import SimpleNamespace

from fakedist.gpu.bare_steps import _numbered

NAMES = [ctypes.create_string_buffer(text) for text in (b"gemm", b"gemm", b"softmax")]
GEMM, GEMM_ELSEWHERE, SOFTMAX = map(ctypes.addressof, NAMES)


def numbered(*keys: tuple[object, ...] | None, first_stream: int) -> list[int]:
    library = SimpleNamespace(fakedist_stream_number=lambda stream: stream and stream - first_stream)
    return _numbered(keys, library)  # type: ignore[arg-type]


def step(name: int, first_stream: int) -> list[int]:
    keys = [(0, first_stream + 1, name, 0, False), ("read", first_stream), (6, first_stream + 1), ("waits for a read",)]
    return numbered(*keys, None, first_stream=first_stream)


def test_launches_have_the_same_numbers_in_another_process_and_others_have_others() -> None:
    here = step(GEMM, 1000)
    assert here == step(GEMM_ELSEWHERE, 2000)
    assert len({*here}) == 5
    assert here[-1] == 0
    assert step(SOFTMAX, 1000)[0] != here[0]
    assert numbered((0, 1002, GEMM, 0, False), first_stream=1000) != here[:1]
    assert numbered((0, 1001, 0, 0, False), first_stream=1000) != here[:1]
    array("Q", here)
