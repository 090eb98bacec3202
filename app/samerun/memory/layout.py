"""How weights, gradients and optimizer states are distributed over processes and devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from samerun import deepspeed
from samerun.fsdp import FsdpSettings
from samerun.kernels.embeddings import can_reuse_gradient_memory
from samerun.plan import BatchShape

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """The properties of a launch that determine a process's memory."""

    world_size: int
    precision: str  # no, fp16, bf16
    on_gpu: bool
    accumulation: int  # micro-batches per optimizer step
    wrapped: bool  # in DistributedDataParallel, whose buckets keep gradients allocated
    stage: int = 0  # of ZeRO; 0: without
    offload_optimizer: bool = False
    offload_parameters: bool = False
    bucket_size: int = 0  # elements of a reduction bucket of ZeRO
    num_buckets: int = 1
    live_parameters: int = 0  # elements that ZeRO-3 keeps gathered
    kernels: str = "auto"  # --kernels
    state_bytes: float = 8.0  # average bytes per trained element of optimizer state and --ema_decay
    fsdp: FsdpSettings | None = None

    @property
    def reuses_gradient_memory(self) -> bool:
        """Whether gradients of large embeddings stay allocated between steps
        (`samerun.kernels.embeddings`)."""
        wrapped = self.wrapped or self.fsdp is not None
        return can_reuse_gradient_memory(
            kernels=self.kernels, on_gpu=self.on_gpu, wrapped=wrapped, zero_stage=self.stage
        )

    @property
    def own_precision(self) -> torch.dtype | None:
        """The half precision of DeepSpeed's weights and gradients, and of weights that FSDP gathers; None for
        fp32."""
        return HALF.get(self.precision) if self.stage or self.fsdp is not None else None

    @property
    def autocast(self) -> torch.dtype | None:
        """The precision to which autocast casts fp32 weights in the forward pass; None without autocast."""
        return None if self.stage else HALF.get(self.precision)


def layout_of(launch: Any, batch: BatchShape, kernels: str = "auto", state_bytes: float = 8.0) -> Layout:
    """The layout of a `launch.Launch`. `kernels`, `state_bytes`: as in `Layout`."""
    wrapped = launch.world_size > 1 or launch.launcher in ("torchrun", "deepspeed")
    on_gpu = not launch.use_cpu
    plain = Layout(
        launch.world_size,
        launch.precision,
        on_gpu,
        batch.accumulation,
        wrapped,
        kernels=kernels,
        state_bytes=state_bytes,
    )
    if launch.fsdp is not None:
        return with_fsdp(plain, launch.fsdp)
    return plain if launch.deepspeed_config is None else with_zero(plain, launch.deepspeed_config)


def with_fsdp(layout: Layout, settings: FsdpSettings) -> Layout:
    """The layout under FSDP2."""
    offloads = settings.offload_params
    return replace(layout, fsdp=settings, offload_optimizer=offloads, offload_parameters=offloads)


def with_zero(layout: Layout, config: dict[str, Any]) -> Layout:
    """The layout under a DeepSpeed configuration; missing values are DeepSpeed 0.19's defaults."""
    section = config["zero_optimization"]
    stage = deepspeed.stage_of(config)
    bucket_size = section.get("reduce_bucket_size", 500_000_000)
    overlaps = section.get("overlap_comm", stage == 3)
    return replace(
        layout,
        stage=stage,
        offload_optimizer=_leaves_the_gpu(section, "offload_optimizer"),
        offload_parameters=stage == 3 and _leaves_the_gpu(section, "offload_param"),
        bucket_size=deepspeed.BUCKETS["reduce_bucket_size"] if bucket_size == "auto" else int(bucket_size),
        num_buckets=2 if overlaps and stage < 3 else 1,
        live_parameters=int(section.get("stage3_max_live_parameters", 1_000_000_000)),
    )


def _leaves_the_gpu(section: dict[str, Any], key: str) -> bool:
    return section.get(key, {}).get("device", "none") not in ("none", None)
