import pytest

from fakedist.run.families import kernel_family


@pytest.mark.parametrize(
    ("name", "operation", "phase", "family"),
    [
        ("cublasGemmEx", "aten.mm.default", "forward", "gemm"),
        ("cublasLtMatmul", "", "backward", "gemm"),
        ("cudnnBackendExecute", "aten._scaled_dot_product_cudnn_attention.default", "forward", "attention"),
        ("cudnnBackendExecute", "aten.convolution.default", "forward", "gemm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::converting_copy_kernel_cuda(...)>",
         "aten._to_copy.default", "forward", "copy"),
        ("Memcpy HtoD", "aten.copy_.default", "other", "copy"),
        ("Memset (Device)", "aten.zero_.default", "backward", "copy"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", "aten._fused_adamw_.default",
         "optimizer", "optimizer"),
    ],
)  # fmt: skip
def test_a_kernels_family_follows_from_its_name_and_its_operation(
    name: str, operation: str, phase: str, family: str
) -> None:
    assert kernel_family(name, operation, phase) == family
