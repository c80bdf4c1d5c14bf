"""Train a GPT built from megatron-core 0.16.1, with the command line of Megatron-LM's pretrain_gpt.py.

    torchrun --nproc-per-node 8 examples/megatron_gpt.py --tensor-model-parallel-size 2 --num-layers 4 ...
    fakedist profile --world-size 64 --rank 0 examples/megatron_gpt.py --preset mixtral-8x7b

Presets: ``mixtral-8x7b`` (64 ranks), ``qwen3-235b`` (256), ``deepseek-v3`` (1,024), as published; later flags override
theirs. Layers are Transformer Engine's if it is installed. A step runs as many microbatches as fill the pipeline, two
for each stage. More microbatches take more time and a little more memory: 16 of Mixtral instead of 8 allocate 0.01 GiB
more and reserve 1.7 GiB more. ``--max-microbatches 0`` runs the whole global batch.
``--hybrid-override-pattern`` trains a model with Mamba layers, as pretrain_mamba.py does; it needs mamba-ssm.
Tokens are synthetic, as with ``--mock-data``.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.enums import CudaGraphScope
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import track_moe_metrics
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron_config import Job, build, microbatches_run
from megatron_flags import parse
from megatron_local import completed
from megatron_presets import PRESETS
from torch import Tensor

Batch = dict[str, Tensor | None]


def join(job: Job) -> None:
    """Make the process groups of the whole job."""
    args = job.args
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    if args.fake_process_group:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group("nccl", timeout=timeout)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=getattr(args, "hierarchical_context_parallel_sizes", None),
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=job.reduction.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=not args.disable_gloo_process_groups,
    )
    at_once = args.micro_batch_size * job.data_parallel_size
    # Asked for by the capture of Transformer Engine's graphs.
    init_num_microbatches_calculator(
        dist.get_rank(), None, microbatches_run(job) * at_once, args.micro_batch_size, job.data_parallel_size
    )
    torch.manual_seed(args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(
        args.seed,
        te_rng_tracker=job.model.use_te_rng_tracker,
        use_cudagraphable_rng=job.model.cuda_graph_impl != "none",
    )


def share_buffers(job: Job) -> None:
    """Make Transformer Engine's user buffers (Megatron-LM's ``_initialize_tp_communicators``)."""
    import yaml
    from transformer_engine.pytorch.module import base

    args, by_product = job.args, {}
    if args.tp_comm_overlap_cfg is not None:
        with open(args.tp_comm_overlap_cfg, encoding="utf-8") as file:
            by_product = yaml.safe_load(file)
    modes, left = base.UserBufferQuantizationMode, _memory_left()
    base.initialize_ub(
        shape=[args.seq_length * args.micro_batch_size // args.context_parallel_size, args.hidden_size],
        tp_size=args.tensor_model_parallel_size,
        quantization_modes=[modes.FP8 if job.model.fp8 else modes.NONE],
        ub_cfgs=by_product,
        bootstrap_backend=job.model.tp_comm_bootstrap_backend,
    )
    print(f"user buffers take {left - _memory_left():,} bytes of the GPU", flush=True)


def _memory_left() -> int:
    """Bytes of the GPU that nothing but the caching allocator has taken."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def build_chunk(job: Job, vp_stage: int | None) -> GPTModel | MambaModel:
    """One model chunk of this rank's pipeline stage."""
    args, config = job.args, job.model
    if args.hybrid_override_pattern:
        return build_hybrid(job)
    spec = get_gpt_decoder_block_spec(config, job.use_te, config.normalization, config.qk_l2_norm, vp_stage)
    if not job.use_te:
        spec = completed(spec, config)
    prediction = None
    if config.mtp_num_layers is not None:
        prediction = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=job.use_te, vp_stage=vp_stage)
    return GPTModel(
        config,
        spec,
        job.vocab_size,
        args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=getattr(args, "rotary_percent", 1.0),
        rotary_base=int(getattr(args, "rotary_base", 10_000)),
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=prediction,
        vp_stage=vp_stage,
    )


def build_hybrid(job: Job) -> MambaModel:
    """This rank's stage of a model with Mamba layers."""
    args = job.args
    return MambaModel(
        job.model,
        mamba_stack_spec,
        job.vocab_size,
        args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        hybrid_override_pattern=args.hybrid_override_pattern,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=getattr(args, "rotary_percent", 1.0),
        rotary_base=int(getattr(args, "rotary_base", 10_000)),
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    )


def build_model(job: Job) -> list[DistributedDataParallel]:
    """The model chunks of this rank, in the precision of training, with buffers for parameters and gradients."""
    virtual = job.model.virtual_pipeline_model_parallel_size
    chunks: list[Any] = [build_chunk(job, stage) for stage in (range(virtual) if virtual else (None,))]
    for chunk in chunks:
        chunk.cuda(torch.cuda.current_device())
    if job.args.bf16 or job.args.fp16:
        chunks = [Float16Module(job.model, chunk) for chunk in chunks]
    stream = torch.cuda.Stream()  # as Megatron-LM does, so that a CUDA graph can be captured later
    stream.wait_stream(torch.cuda.current_stream())
    one_bucket = job.optimizer.overlap_param_gather_with_optimizer_step
    with torch.cuda.stream(stream):
        model = [
            DistributedDataParallel(job.model, job.reduction, chunk, disable_bucketing=number > 0 or one_bucket)
            for number, chunk in enumerate(chunks)
        ]
    torch.cuda.current_stream().wait_stream(stream)
    return model


def build_schedule(job: Job, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay by the number of samples."""
    args = job.args
    samples = args.train_samples or (args.train_iters or args.exit_interval) * (args.global_batch_size or 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_samples,
        lr_decay_steps=args.lr_decay_samples or samples,
        lr_decay_style=args.lr_decay_style,
        start_wd=job.optimizer.weight_decay,
        end_wd=job.optimizer.weight_decay,
        wd_incr_steps=samples,
        wd_incr_style="constant",
    )


def samples(job: Job) -> Iterator[Batch]:
    """Two batches of synthetic tokens in turns, in pinned memory: as with a data loader, no step makes them."""
    args = job.args
    generator = torch.Generator().manual_seed(args.seed + parallel_state.get_data_parallel_rank())
    shape = (args.micro_batch_size, args.seq_length)
    shared: Batch = {
        "loss_mask": torch.ones(shape).pin_memory(),
        "position_ids": torch.arange(shape[1]).expand(shape).contiguous().pin_memory(),
        "attention_mask": None,
    }
    if args.create_attention_mask_in_dataloader:
        mask = torch.ones(shape[1], shape[1], dtype=torch.bool).triu(1)
        shared["attention_mask"] = mask.expand(shape[0], 1, -1, -1).contiguous().pin_memory()
    batches: list[Batch] = []
    for _ in range(2):
        tokens = torch.randint(args.vocab_size, (shape[0], shape[1] + 1), generator=generator)
        ends = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        batches.append({name: value.pin_memory() for name, value in ends.items()} | shared)
    yield from cycle(batches)


def get_batch(job: Job, data: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """This pipeline stage's part of a micro-batch: read by the first tensor parallel rank, sent to the others.

    The rank that reads moves all of it to its GPU, also what its stage does not need, as Megatron-LM does.
    """
    args = job.args
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    names = {"tokens", "position_ids"} if first else set()
    names |= {"labels", "loss_mask"} if last else set()
    names |= {"tokens", "position_ids"} if last and job.model.mtp_num_layers else set()  # it embeds the next tokens
    names |= {"attention_mask"} if names else set()
    batch: Batch = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids", "attention_mask"))
    if not names:
        return batch
    shape = (args.micro_batch_size, args.seq_length)
    source = parallel_state.get_tensor_model_parallel_src_rank()
    read = next(data) if data is not None and dist.get_rank() == source else None
    if read is not None:
        batch |= {name: value.cuda(non_blocking=True) for name, value in read.items() if value is not None}
    for name in batch:
        if name not in names or (name == "attention_mask" and not args.create_attention_mask_in_dataloader):
            continue
        if (value := batch[name]) is not None:
            pass
        elif name == "attention_mask":
            value = torch.empty((shape[0], 1, shape[1], shape[1]), dtype=torch.bool, device="cuda")
        else:
            value = torch.empty(shape, dtype=torch.float32 if name == "loss_mask" else torch.int64, device="cuda")
        dist.broadcast(value, source, group=parallel_state.get_tensor_model_parallel_group())
        batch[name] = value
    group = parallel_state.get_context_parallel_group()
    # megatron-core 0.19 has another parameter, and takes no group for the whole job.
    is_new = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
    more = {"is_hybrid_cp": False} if is_new else {}
    on_this_rank: Batch = get_batch_on_this_cp_rank(batch, cp_group=group, **more)
    return on_this_rank


def loss_of(job: Job, loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the losses, which the host reads to check it; number of tokens, and what is written in the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    for wrong in (torch.isnan, torch.isinf) if job.reduction.check_for_nan_in_grad else ():
        get_rerun_state_machine().validate_result(loss, wrong, f"{wrong.__name__} of the loss")
    report = torch.cat([loss.detach().view(1), num_tokens.detach().view(1).to(loss.dtype)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    job: Job, data: Iterator[Batch] | None, model: DistributedDataParallel, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[Tensor], Any]]:
    """Forward of one microbatch through one model chunk; or its plan, where chunks of two microbatches overlap."""
    batch = get_batch(job, data, get_attr_wrapped_model(model, "vp_stage"))
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    loss = partial(loss_of, job, batch["loss_mask"])
    if return_schedule_plan:
        plan = get_attr_wrapped_model(model, "build_schedule_plan")
        return plan(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"]), loss
    if job.model.is_hybrid_model:  # which predicts no further tokens
        return model(*inputs, labels=batch["labels"]), loss
    return model(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"]), loss


def connect(job: Job, model: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Tell the schedule how gradients and parameters are exchanged."""
    config, reduction = job.model, job.reduction

    def of_each(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in model]
        return functions if len(functions) > 1 else functions[0]

    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if reduction.overlap_grad_reduce:
        config.no_sync_func = of_each("no_sync")
        if job.args.align_grad_reduce:
            config.grad_sync_func = of_each("start_grad_sync")
    if reduction.overlap_param_gather and reduction.align_param_gather:
        config.param_sync_func = of_each("start_param_sync")


class Trainer:
    """Runs training steps.

    Args:
        job: What the flags say.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = build_model(job)
        self.optimizer = get_megatron_optimizer(
            job.optimizer, self.model, use_gloo_process_groups=not job.args.disable_gloo_process_groups
        )
        self.schedule = build_schedule(job, self.optimizer)
        connect(job, self.model, self.optimizer)
        self.data: list[Iterator[Batch]] = [samples(job) for _ in self.model]
        self.run = get_forward_backward_func()
        if job.model.cuda_graph_impl == "local" and CudaGraphScope.full_iteration in job.model.cuda_graph_scope:
            self.run = FullCudaGraphWrapper(self.run, cuda_graph_warmup_steps=job.model.cuda_graph_warmup_steps)
        # Parameters that this rank initialised are not gathered from others before the first update.
        self._gathered = job.reduction.use_distributed_optimizer and job.reduction.overlap_param_gather
        self._param_sync = job.model.param_sync_func
        if self._gathered:
            job.model.param_sync_func = None
            for chunk in self.model:
                chunk.disable_forward_pre_hook(param_sync=False)

    def step(self, number: int) -> str:
        """Forward and backward of all microbatches, and an update; what is to be logged."""
        job, args = self.job, self.job.args
        if job.model.cuda_graph_impl == "transformer_engine" and number == job.model.cuda_graph_warmup_steps:
            self._capture()
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.run(
            forward_step_func=partial(forward_step, job),
            data_iterator=self.data if len(self.data) > 1 else self.data[0],
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=microbatches_run(job),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=None,
            forward_only=False,
        )
        if args.empty_unused_memory_level >= 1:
            torch.cuda.empty_cache()
        updated, norm, num_zeros = self.optimizer.step()
        if updated:
            self.schedule.step(increment=args.global_batch_size or 1)
        if args.empty_unused_memory_level >= 2:
            torch.cuda.empty_cache()
        if self._gathered and number == 0:
            for chunk in self.model:
                chunk.enable_forward_pre_hook()
            job.model.param_sync_func = self._param_sync
        return self._log(losses, norm, num_zeros)

    def _capture(self) -> None:
        """Capture the graphs of layers that Transformer Engine replays from now on."""
        args = self.job.args
        helper = TECudaGraphHelper(self.model, self.job.model, args.seq_length, args.micro_batch_size, [self.optimizer])
        for chunk in self.model if self._gathered else ():  # no module may have a hook while it is captured
            chunk.disable_forward_pre_hook(param_sync=False)
        helper.create_cudagraphs()
        for chunk in self.model if self._gathered else ():
            chunk.enable_forward_pre_hook()
        helper.cuda_graph_set_manual_hooks()

    def _log(self, losses: list[dict[str, Tensor]], norm: Any, num_zeros: Any) -> str:
        parts = []
        if losses:
            total = torch.vstack([each["lm loss"] for each in losses]).sum(dim=0)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            parts.append(f"lm loss {(total[0] / total[1]).item():.4f}")
        parts.append(f"grad norm {float(norm):.4f}" if norm is not None else "grad norm not computed")
        if num_zeros is not None:
            parts.append(f"zeros {int(num_zeros):,}")
        if self.job.model.num_moe_experts:
            track_moe_metrics(
                loss_scale=1 / microbatches_run(self.job),
                iteration=0,
                total_loss_dict={},
                force_initialize=True,
                track_names=["load_balancing_loss"],
                num_layers=self.job.model.num_layers,
                moe_layer_freq=self.job.model.moe_layer_freq,
                mtp_num_layers=self.job.model.mtp_num_layers,
            )
        return "  ".join(parts)


def train(job: Job) -> None:
    """Build everything and train; the last pipeline stage of the first replica, and rank 0, say how it goes."""
    trainer = Trainer(job)
    args = job.args
    if args.manual_gc:
        gc.disable()
    for number in range(min(args.exit_interval, args.train_iters or args.exit_interval)):
        line = trainer.step(number)
        print(f"step {number + 1}  {line}", flush=True)
        if args.manual_gc and args.manual_gc_interval and not (number + 1) % args.manual_gc_interval:
            gc.collect()


def announce(job: Job) -> None:
    """Say what runs, and what is otherwise than the flags say."""
    args, rank = job.args, parallel_state
    run = microbatches_run(job)
    stage = rank.get_pipeline_model_parallel_rank()
    print(
        f"pipeline stage {stage} of {args.pipeline_model_parallel_size}, data parallel size {job.data_parallel_size}, "
        f"{'Transformer Engine' if job.use_te else 'local'} layers, vocabulary {job.vocab_size:,}, "
        f"{run} of {job.num_microbatches} microbatches a step"
        f"{'' if run == job.num_microbatches else ' (they fill the pipeline; --max-microbatches 0 runs all)'}"
    )
    if args.ignored:
        print(f"without effect here: {' '.join(args.ignored)}")
    for note in job.notes:
        print(note, flush=True)


def main() -> None:
    """Join the job, train, leave it."""
    args = parse(sys.argv[1:])
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.preset and world_size != PRESETS[args.preset][0]:
        print(f"{args.preset} was published with {PRESETS[args.preset][0]:,} ranks; this job has {world_size:,}")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    job = build(args, world_size)
    if job.model.deterministic_mode:
        torch.use_deterministic_algorithms(True)  # as Megatron-LM does; it also fills what torch.empty returns
    join(job)
    if job.model.tp_comm_overlap:
        share_buffers(job)
    announce(job)
    train(job)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
