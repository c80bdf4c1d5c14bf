import pytest

from fakedist.rundir.families import kernel_family


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
        # Softmax and losses are norms, embeddings are copies.
        ("cudnnBackendExecute", "aten._softmax.default", "backward", "norm"),
        ("void at::native::reduce_kernel<512, 1>", "aten.nll_loss_forward.default", "backward", "norm"),
        ("void at::native::index_elementwise_kernel<128, 4>", "aten.index_put_.default", "backward", "copy"),
        ("void at::native::index_elementwise_kernel<128>", "aten.embedding_dense_backward.default", "forward", "copy"),
        ("void at::native::reduce_kernel<512, 1>", "aten.sum.dim_IntList", "backward", "other"),
    ],
)  # fmt: skip
def test_a_kernels_family_follows_from_its_name_and_its_operation(
    name: str, operation: str, phase: str, family: str
) -> None:
    assert kernel_family(name, operation, phase) == family


#: Names of kernels in the form that profilers print: many from the binaries of torch 2.15, NCCL and Transformer Engine
#: 2.20 and from profiles published with issues of torch, flash-attention, sglang and nanochat, the others written after
#: them. Some are cut. The name is all that a report of Nsight Systems without ranges of operations tells.
REAL = {
    "communication": """
        ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclKernel_ReduceScatter_RING_LL_Sum_bfloat16(ncclDevComm*, unsigned long, ncclWork*)
        void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long, unsigned int**, unsigned int**
        void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8, false>(c10::BFloat16**)
        void deep_ep::internode::dispatch<false, 8, false, 9216>(int4*, float*, long*)
        """,
    "attention": """
        void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>
        void flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 128, 128, 8, 4, 4, 4, false, false>>
        void flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8, 4, 4, 4, false, false>>
        void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>
        fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)
        cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0
        cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_27_64x128x128_1x1x1_cga1x1x1_kernel0_0
        triton_tem_fused_flex_attention_0
        void scaled_upper_triang_masked_softmax_warp_forward<__nv_bfloat16, __nv_bfloat16, float, 11>(__nv_bfloat16*)
        void transformer_engine::context_parallel::thd_out_correction_kernel<__nv_bfloat16, 16, false>
        """,
    "norm": """
        void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(int, float)
        void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float, 128u, 1u>
        void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::BFloat16>(long, c10::BFloat16)
        void cuApplyLayerNorm<float, float, float>(float*, float*, float*, float const*, int, int)
        void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits<__nv_bfloat16>>(ForwardKernelPara
        void transformer_engine::normalization::ln_bwd_finalize_tuned_kernel<Kernel_traits_finalize<4096u>>
        void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float, int, 512, true, 1, true>(cudnnTensorStruct)
        _rms_norm_forward_kernel
        triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3
        void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, c10::BFloat16>
        void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, true, false>(float*, float const*)
        void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float>
        void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>
        liger_cross_entropy_kernel
        triton_red_fused__log_softmax_0
        """,
    "gemm": """
        nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT
        nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN
        sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_
        ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn
        void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8>(Params)
        void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape>>
        void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false, false>
        void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>
        void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>, cublasGemvTensor<float>>>
        sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage4_warpsize2x2x1_g1
        sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize256x64x64_cgasize1x1x1_stage4
        void cudnn::cnn::wgrad2d_grouped_direct_kernel<float, float, int, float, float, 128, 8, true>
        void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, c10::Half, int>
        triton_tem_fused_addmm_0
        _fp8_gemm_kernel
        """,
    "copy": """
        Memcpy HtoD (Pinned -> Device)
        Memset (Device)
        void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cu
        void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<at::native::OpaqueType<2u>, 2, 128>
        void at::native::(anonymous namespace)::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**, char**)
        void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**, float*)
        void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>(cudnn::ops::nchw2nhwc_params_t<float>)
        void transformer_engine::detail::cast_transpose_fused_kernel_notaligned<false, false, float>
        triton_poi_fused__to_copy_transpose_2
        triton_poi_fused_cat_7
        void moe_permute_kernel<__nv_bfloat16, __nv_bfloat16, 128, false>(__nv_bfloat16 const*)
        void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)
        void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel<fal
        void at::native::indexFuncLargeIndex<float, long, unsigned int, 2, 2, -2, true, at::native::ReduceAdd>
        void at::native::(anonymous namespace)::embedding_backward_feature_kernel<c10::BFloat16, float, long>
        void at::native::(anonymous namespace)::sum_and_scatter<c10::BFloat16, long>(long const*, c10::BFloat16*)
        """,
    "optimizer": """
        void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>
        void multi_tensor_apply_kernel<TensorListMetadata<5, true>, transformer_engine::multi_tensor_adam::AdamFunctorMa
        void multi_tensor_apply_kernel<TensorListMetadata<3>, SGDFunctor<3, float, float>, bool, float, float>
        void adam_cuda_kernel<float, float>(float*, float*, float*, float const*, float, float, float, float)
        """,
    "elementwise": """
        void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*,
        void at::native::unrolled_elementwise_kernel<at::native::BinaryFunctor<float, float, float, MulFunctor<float>>>
        void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>
        void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float, 2>
        void at::native::triu_tril_kernel<c10::BFloat16, int, false, 2, false>(TensorInfo<c10::BFloat16, int>)
        void transformer_engine::unary_kernel<4, float, transformer_engine::detail::DequantizeParam, __nv_bfloat16>
        _swiglu_forward_kernel
        fused_rope_forward_kernel
        triton_poi_fused_mul_silu_4
        triton_poi_fused__to_copy_convolution_mul_0
        triton_poi_fused__scaled_dot_product_flash_attention_backward_transpose_1
        """,
    "other": """
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, func_wrapper_t<float, sum_functor<float>>, 4>
        void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<Policy, false, int, long, int>
        void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(TensorInfo<float const, unsigned int>)
        void at::native::tensor_kernel_scan_innermost_dim<long, std::plus<long>>(long*, long const*, unsigned int)
        triton_per_fused_sum_2
        triton_red_fused__to_copy_convolution_backward_sum_1
        """,
}


@pytest.mark.parametrize(("family", "names"), REAL.items())
def test_names_of_real_gpus_kernels_tell_their_family(family: str, names: str) -> None:
    families = {name.strip(): kernel_family(name.strip()) for name in names.strip().splitlines()}
    assert {name: other for name, other in families.items() if other != family} == {}
