"""The module of each line of generated code, and the buffer that each buffer reuses."""

from __future__ import annotations

from fakedist.record.compiled_graphs import COMPILED, parse_generated, with_modules

CODE = """
async_compile = None

class Runner:
    def call(self, args):
        primals_1, mm, tangents_1 = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
            # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.mm]
            extern_kernels.mm(primals_1, tangents_1, out=buf0)
            buf1 = mm; del mm  # reuse
            buf2 = empty_strided_cuda((8, ), (1, ), torch.float32)
            triton_poi_fused_add_0.run(buf1, buf0, buf2, 64, stream=raw_stream0)
            buf3 = torch.ops.aten.attention.default(buf0)
            del buf0
            buf4 = buf3[0]
            buf5 = reinterpret_tensor(buf4, (64, ), (1, ), 0); del buf4  # reuse
            buf6 = reinterpret_tensor(buf5, (8, 8), (8, 1), 0)
            triton_poi_fused_mul_1.run(buf5, 64, stream=raw_stream0)
        return (buf1, buf6, )
"""
MODULES = {"buf0": 0, "buf1": 1, "buf2": 2, "buf3": 3, "buf4": 3, "buf5": 4}


def line_of(text: str, source: str = CODE) -> int:
    return next(number for number, line in enumerate(source.splitlines(), start=1) if text in line)


def test_what_a_statement_works_for_is_the_module_of_what_it_writes() -> None:
    generated = parse_generated(with_modules(CODE, MODULES))
    assert generated is not None
    assert {
        text: generated.lines[line_of(text)] for text in ("buf0 = empty", "mm(primals", "add_0", "attention", "mul_1")
    } == {
        "buf0 = empty": 0,
        "mm(primals": 0,
        "add_0": 2,
        "attention": 3,
        "mul_1": 4,
    }
    assert line_of("return") not in generated.lines


def test_memory_that_changes_hands_is_followed_to_who_allocated_it_or_to_an_input() -> None:
    generated = parse_generated(with_modules(CODE, MODULES))
    assert generated is not None
    assert generated.holders == [
        (-2, line_of("buf1 = mm"), 1),  # the second input
        (line_of("buf3 = "), line_of("buf5 ="), 4),  # buf6 is only another name
    ]


def test_a_buffer_that_no_module_is_known_of_is_the_compiled_modules() -> None:
    generated = parse_generated(with_modules(CODE, MODULES | {"buf0": COMPILED}))
    assert generated is not None
    assert generated.lines[line_of("buf0 = empty")] == COMPILED


def test_code_that_was_compiled_without_us_tells_nothing() -> None:
    assert parse_generated(CODE) is None
    assert parse_generated("") is None


def test_inputs_of_a_part_of_a_graph_are_not_the_graphs() -> None:
    generated = parse_generated(with_modules(CODE.replace("def call(self, args)", "def partition_0(args)"), MODULES))
    assert generated is not None
    assert [root for root, _, _ in generated.holders] == [line_of("buf3 = ")]
