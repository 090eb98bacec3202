import json
from types import SimpleNamespace

import torch

from samerun.fsdp import FsdpSettings
from samerun.memory.layout import Layout, layout_of, with_zero
from samerun.plan import BatchShape


def test_what_a_deepspeed_file_says(request):
    plain = Layout(8, "bf16", True, 1, True)

    def shipped(name):
        return with_zero(
            plain, json.loads((request.config.rootpath / "ds_configs" / f"{name}.json").read_text())
        )

    assert (shipped("zero1").stage, shipped("zero1").num_buckets) == (1, 1)
    assert (shipped("zero2").bucket_size, shipped("zero2").num_buckets) == (50_000_000, 2)
    assert (shipped("zero3").live_parameters, shipped("zero3").offload_optimizer) == (10**9, False)
    assert [shipped(f"zero{n}_offload").offload_parameters for n in (2, 3)] == [False, True]
    assert (plain.autocast, plain.own_precision) == (torch.bfloat16, None)
    assert (shipped("zero2").autocast, shipped("zero2").own_precision) == (None, torch.bfloat16)


def test_the_layout_of_a_launch():
    launch = SimpleNamespace(
        world_size=1, precision="no", use_cpu=True, launcher="torchrun", deepspeed_config=None, fsdp=None
    )
    assert layout_of(launch, BatchShape(8, 1, 4, 2)) == Layout(1, "no", False, 2, wrapped=True)
    launch.launcher = "python"
    assert not layout_of(launch, BatchShape(8, 1, 4, 2)).wrapped
    launch.fsdp, launch.precision = FsdpSettings(offload_params=True), "bf16"
    found = layout_of(launch, BatchShape(8, 1, 4, 2))
    assert (found.offload_parameters, found.offload_optimizer, found.reuses_gradient_memory) == (
        True,
        True,
        False,
    )
    assert (
        found.own_precision == found.autocast == torch.bfloat16
    )  # gathered in it, and computed as under DDP
