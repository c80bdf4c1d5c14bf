"""cuSOLVER, cuSPARSE and cuBLAS's factorisations in the driver: sizes, success, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gpu.driver import on_driver

_SCRIPT = """
handle = c_void_p(make("cusolverDnCreate"))
information = c_void_p(make("cusolverDnCreateSyevjInfo"))

def elements(function, *arguments):
    out = c_int()
    status = getattr(driver, function)(handle, *(byref(out) if each is None else each for each in arguments))
    return out.value if status == 0 else f"status {status}"

found["Jacobi"] = {
    batch: elements("cusolverDnCheevjBatched_bufferSize", 1, 0, 4, NULL, 4, NULL, None, information, batch)
    for batch in (1, 2, 4, 512)
}
found["QR of 3 x 3"] = [
    elements("cusolverDnSgeqrf_bufferSize", 3, 3, NULL, 3, None),
    elements("cusolverDnSorgqr_bufferSize", 3, 3, 3, NULL, 3, NULL, None),
]
found["too large"] = elements("cusolverDnSsyevd_bufferSize", 1, 0, 40000, NULL, 40000, NULL, None)
on_device, on_host = c_size_t(), c_size_t()
driver.cusolverDnXsyevd_bufferSize(
    handle, NULL, 1, 0, c_int64(40000), 0, NULL, c_int64(40000), 0, NULL, 0, byref(on_device), byref(on_host)
)
found["in 64 bits"] = on_device.value

def written(function, *arguments, count=3):
    "What is in device memory that held ones, for each matrix of a batch."
    address = make("cudaMalloc", c_size_t(4 * count))
    ctypes.memset(address, 1, 4 * count)
    status = getattr(driver, function)(*(c_void_p(address) if each is None else each for each in arguments))
    assert status == 0, (function, status)
    return list((c_int * count).from_address(address))

blas = c_void_p(make("cublasCreate_v2"))
found["of one matrix"] = [
    written("cusolverDnSgetrf", handle, 4, 4, NULL, 4, NULL, NULL, None),
    written("cusolverDnDpotrf", handle, 0, 4, NULL, 4, NULL, 0, None),
    written("cusolverDnZgesvdj", handle, 1, 0, 4, 4, NULL, 4, NULL, NULL, 4, NULL, 4, NULL, 0, None, NULL),
    written("cusolverDnXpotrs", handle, NULL, 0, *[c_int64(4)] * 2, *[0, NULL, c_int64(4)] * 2, None),
]
found["of a batch"] = [
    written("cusolverDnSpotrfBatched", handle, 0, 4, NULL, 4, None, 3),
    written("cusolverDnCheevjBatched", handle, 1, 0, 4, NULL, 4, NULL, NULL, 0, None, information, 3),
    written("cublasSgetrfBatched", blas, 4, NULL, 4, NULL, None, 3),
    written("cublasZmatinvBatched", blas, 4, NULL, 4, NULL, 4, None, 3),
]
arguments = c_int(7)
driver.cublasDgeqrfBatched(blas, 4, 4, NULL, 4, NULL, byref(arguments), 3)
found["about the arguments"] = arguments.value

sparse, matrix = c_void_p(make("cusparseCreate")), c_void_p()
sizes = [c_int64(each) for each in (100, 50, 700)]
driver.cusparseCreateCsr(byref(matrix), *sizes, NULL, NULL, NULL, 0, 0, 0, 0)
back = [c_int64() for _ in range(3)]
driver.cusparseSpMatGetSize(matrix, *map(byref, back))
found["sizes of a sparse matrix"] = [each.value for each in back]
buffer = c_size_t()
status = driver.cusparseSpMM_bufferSize(sparse, 0, 0, NULL, matrix, NULL, NULL, NULL, 0, 0, byref(buffer))
found["buffer of a product"] = [status, buffer.value]
found["a result whose places are not known"] = driver.cusparseSpGEMM_createDescr(byref(c_void_p()))
pivot = c_int(7)
driver.cusparseXbsrsv2_zeroPivot(sparse, NULL, byref(pivot))
found["zero pivot"] = pivot.value

before = [note.code for note in gpu.notes()]
managed = make("cudaMallocManaged", c_size_t(3 * MIB), 1)
found["prefetch"] = driver.cudaMemPrefetchAsync(c_void_p(managed), c_size_t(MIB))
found["notes"] = {"before": before} | {note.code: note.text for note in gpu.notes()}
"""


ONES, NOT_SUPPORTED = 0x01010101, 10
EXPECTED = {
    # As large as the published ones: cupy/cupy#7261 for Jacobi's method, JAX's export tests for QR.
    "Jacobi": {"1": 2077, "2": 3126, "4": 5224, "512": 1028 + 512 * 1049},
    "QR of 3 x 3": [196608, 33056],
    # An area that an int cannot say is an invalid value, and fits in 64 bits.
    "too large": "status 3",
    "in 64 bits": 4 * (1 + 6 * 40000 + 2 * 40000**2),
    # Each matrix is factorised with success.
    "of one matrix": [[0, ONES, ONES]] * 4,
    "of a batch": [[0, 0, 0]] * 4,
    "about the arguments": 0,
    "sizes of a sparse matrix": [100, 50, 700],
    "buffer of a product": [0, 4 * 101],
    "a result whose places are not known": NOT_SUPPORTED,
    "zero pivot": -1,  # none
    "prefetch": 0,
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return on_driver(_SCRIPT)


@pytest.mark.parametrize("what", EXPECTED)
def test_the_driver_answers(found: dict[str, Any], what: str) -> None:
    assert found[what] == EXPECTED[what]


def test_estimated_areas_and_managed_memory_are_named(found: dict[str, Any]) -> None:
    notes = found["notes"]
    assert notes["before"] == ["work_areas_estimated"]
    assert "cusolverDnXsyevd_bufferSize and 4 other functions, at most 11.92 GiB each" in notes["work_areas_estimated"]
    assert notes["memory_managed"].startswith("3.00 MiB of managed memory")
