"""Kernels that fit: names across versions of torch, families of a library's calls, grids, bytes and sizes."""

import pytest

from fakedist.extras.calibration.matching import STRONG, Signature, conflicts, operation_name, plain_name, score

_NEW = "void at::native::vectorized_elementwise_kernel<4, at::native::silu_functor, std::array<char*, 2ul>>(int)"
_OLD = "void at::native::vectorized_elementwise_kernel<4, at::native::silu_functor, at::detail::Array<char*, 2>>(int)"
_OTHER = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::tanh_kernel_cuda(...), std::array<char*, 2ul>>(int)"
)
PRODUCT = Signature("product", "cublasGemmEx", "gemm", ("aten::mm",), sizes=(512, 1024, 64))


def one(recorded: Signature, traced: Signature) -> int:
    return int(score([recorded], [traced])[0, 0])


def kernel(name: str, grid: str = "", operations: tuple[str, ...] = (), family: str = "elementwise") -> Signature:
    return Signature("kernel", name, family, operations, grid)


NVJET = kernel("nvjet", "8,1,1", ("aten::mm",), "gemm")
COPY = Signature("copy", "Memcpy DtoD", "copy", num_bytes=4096)


@pytest.mark.parametrize(
    ("recorded", "traced", "points"),
    [
        (kernel("one", "8,1,1"), kernel("one", "8,1,1"), 60),
        (kernel("one", "8,1,1"), kernel("one", "9,1,1"), 30),
        (kernel("one", "8,1,1"), kernel("one"), 40),
        (kernel("triton_poi_2", "8,1,1"), kernel("triton_poi_7", "9,1,1"), 40),  # Triton tunes its grids
        (kernel("triton_poi_2", "8,1,1"), kernel("triton_poi_7", "8,1,1"), 60),
        (kernel("one", operations=("aten::silu",)), kernel("one", operations=("aten::mul", "aten::silu")), 70),
        (kernel("one", operations=("aten::silu",)), kernel("one"), 40),
        (kernel("one two"), kernel("one"), 20),  # half of the words
        (kernel("one two three"), kernel("one"), 5),
        (kernel("one", family="norm"), kernel("two"), -10),
        (kernel("one", family="optimizer"), kernel("two"), 5),
        (kernel("void at::one<int>"), kernel("float one(char)"), 20),
        (PRODUCT, NVJET, 60),
        (PRODUCT, NVJET._replace(sizes=(512, 1024, 64)), 90),
        (PRODUCT, NVJET._replace(sizes=(512, 1024, 65)), -40),
        (PRODUCT, NVJET._replace(name="splitKreduce_kernel"), 35),
        (PRODUCT, NVJET._replace(family="other"), 30),
        (PRODUCT._replace(kind="library", family="other"), NVJET, 30),
        (PRODUCT._replace(kind="library"), NVJET, 60),
        (PRODUCT, NVJET._replace(family="norm"), -1000),
        (COPY, COPY, 50),
        (COPY, COPY._replace(num_bytes=64), 0),
        (COPY, COPY._replace(num_bytes=-1), 20),
        (COPY._replace(num_bytes=-1), COPY._replace(name="Memcpy HtoD"), -1000),
        (COPY._replace(kind="fill"), COPY, -970),
        (kernel("one"), COPY, -1000),
    ],
)
def test_each_pair_has_its_points(recorded: Signature, traced: Signature, points: int) -> None:
    assert one(recorded, traced) == points


def test_names_fit_across_versions_but_a_name_that_both_sides_have_fits_no_other() -> None:
    assert one(kernel(_NEW, "8,1,1"), kernel(_NEW, "8,1,1")) >= STRONG
    same, older, other = (one(kernel(_NEW, "8,1,1"), kernel(name, "8,1,1")) for name in (_NEW, _OLD, _OTHER))
    assert same > older > other > 0
    new, other, older = (kernel(name, "8,1,1", ("aten::silu",)) for name in (_NEW, _OTHER, _OLD))
    found = score([new, other], [new, older])
    assert found[0, 0] >= STRONG
    assert found[0, 1] <= 0
    assert found[1, 0] <= 0
    assert found[1, 1] > 0


def test_families_and_operations_count_and_other_grids_conflict() -> None:
    nvjet = kernel("nvjet_tst_192x192", "132,1,1", ("aten::mm", "aten::matmul"), "gemm")
    assert one(PRODUCT, nvjet) >= STRONG
    assert one(PRODUCT, kernel(_NEW, "8,1,1", ("aten::mm",))) <= 0
    completing = kernel("void cublasLt::splitKreduce_kernel<32>", "8,1,1", ("aten::mm",), "gemm")
    assert one(PRODUCT, completing) < one(PRODUCT, nvjet)
    traced = [kernel(_NEW, "8,1,1", ("aten::silu",)), kernel(_NEW, "8,1,1", ("aten::mul",))]
    silu, compiled = (kernel(_NEW, "8,1,1", (name,)) for name in ("aten::silu", "CompiledFunction"))
    found = score([silu, compiled], traced)
    assert found[0, 0] > found[0, 1]
    assert found[1, 0] == found[1, 1]
    plain, tuned = kernel(_NEW, "8,1,1"), kernel("triton_poi_fused_add_3", "8,1,1")
    found = conflicts([plain, tuned], [kernel(_NEW, "9,1,1"), kernel(_NEW)])
    assert found.tolist() == [[True, False], [False, False]]
    assert operation_name("aten.add_.Tensor") == "aten::add_"
    assert operation_name("fsdp.all_gather_copy_in.default") == "fsdp::all_gather_copy_in"
    assert operation_name("CompiledFunction") == "CompiledFunction"


def test_sizes_of_operands_and_the_direction_and_bytes_of_copies_decide() -> None:
    same, other = (
        kernel("nvjet", "", ("aten::mm",), "gemm")._replace(sizes=sizes)
        for sizes in ((512, 1024, 64), (512, 1024, 128))
    )
    assert one(PRODUCT, same) >= STRONG
    assert one(PRODUCT, other) <= 0
    recorded = Signature("copy", "Memcpy DtoD", "copy", num_bytes=4096)
    assert one(recorded, recorded) >= STRONG
    assert one(recorded, recorded._replace(num_bytes=64)) <= 0
    assert one(recorded, recorded._replace(name="Memcpy HtoD")) <= 0
    assert one(recorded, kernel("direct_copy_kernel")) <= 0


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("triton_poi_fused_add_mul_12", "triton_poi_fused_add_mul"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
        ("Memset (Device)", "Memset"),
        ("nvjet_tst_192x192", "nvjet_tst_192x192"),
    ],
)
def test_names_without_what_varies(name: str, plain: str) -> None:
    assert plain_name(name) == plain
