"""Compiled code marks tensors where Python finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.virtual_worker import on_virtual_gpu

if TYPE_CHECKING:
    import torch


def _tensors() -> list[torch.Tensor]:
    """Parameters with and without gradients, views, what has no memory here, and a tensor subclass."""
    import torch
    from torch import nn
    from torch.testing._internal.two_tensor import TwoTensor

    plain, of_views = nn.Parameter(torch.ones(64, 64, device="cuda")), torch.ones(5, 1000, device="cuda:1")
    trained, freed = nn.Parameter(torch.ones(300, device="cuda")), torch.ones(4096, device="cuda")
    (trained * 2).sum().backward()
    freed.untyped_storage().resize_(0)
    both = TwoTensor(torch.ones(8, device="cuda"), torch.ones(8, device="cuda"))
    views = [of_views, of_views[2:4, 10:], of_views[3].to(torch.bfloat16)[7:], of_views.t()]
    nothing = [freed, torch.ones(3), torch.empty(0, device="cuda"), of_views[:0]]
    return [plain, trained, *views, *nothing, both, plain]


@on_virtual_gpu
def test_compiled_code_marks_the_pieces_that_python_marks() -> None:
    from fakedist.gpu.fast_path.compiled import CompiledFastPath
    from fakedist.record.marker import WHAT_BITS, Marker, What
    from fakedist.record.marks import KEEP_LAYER, Marks
    from fakedist.record.module_names import LayerTable
    from fakedist.record.position import Position
    from fakedist.run.memory_records import MarksRecord

    tensors = _tensors()

    def marked(marker: Marker | None, position: Position) -> MarksRecord:
        marks = Marks(position, LayerTable(), marker)
        for what in What:
            for layer in (7, KEEP_LAYER, KEEP_LAYER):
                wanted = [layer << WHAT_BITS | what] * len(tensors)
                marks._marker.mark_tensors(tensors, wanted, marks._locate)
                for tensor, each in zip(tensors, wanted, strict=True):
                    marks._marker.mark_tensor(tensor, each, marks._locate)
        return marks.take()

    position = Position()
    position.cells.op = 12
    path = CompiledFastPath(None)
    path.begin(position.cells, position.whereabouts)
    python, compiled = marked(None, position), marked(path.marker, position)
    assert len(python.category) > 100
    assert compiled == python
    assert not path.marker.take_marks().op


@on_virtual_gpu
def test_compiled_code_counts_each_piece_once() -> None:
    import ctypes

    import torch

    from fakedist.gpu.fast_path.build import ensure_fast_path
    from fakedist.gpu.fast_path.marks import CompiledMarker
    from fakedist.record.marker import What

    *tensors, both, last = _tensors()
    marker = CompiledMarker(ctypes.PyDLL(str(ensure_fast_path())))
    own = sum({t.data_ptr(): t.nbytes for t in tensors if t.is_cuda and t.untyped_storage().nbytes()}.values())
    with_gradient = [What.PARAMETER_AND_ITS_GRADIENT] * (len(tensors) + 1)
    assert marker.bytes_of([*tensors, last], [What.PARAMETER] * (len(tensors) + 1)) == own
    assert marker.bytes_of([*tensors, last], with_gradient) == own + 300 * torch.float32.itemsize
    assert marker.bytes_of([both], [What.PARAMETER]) is None
