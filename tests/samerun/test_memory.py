import json
import random
from dataclasses import replace
from functools import lru_cache, wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from text_tasks import SEARCH, classification, titles
from tiny_models import big_bird_titles, peak_bytes, sizes, text_batch, title_batch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification

import samerun.kernels.dropout
from samerun.errors import TrainingError
from samerun.fsdp import FsdpSettings
from samerun.kernels import block_attention
from samerun.kernels.dropout import dropout_by_row
from samerun.launch import Launch
from samerun.layers import checkpoint_activations
from samerun.memory import (
    GIB,
    OUTSIDE_TENSORS,
    DryRun,
    Layout,
    dry_run,
    estimate,
    freeze_unused,
    memory_lines,
)
from samerun.models.adapters import limit_training
from samerun.optimizer import build_optimizer
from samerun.plan import BatchShape
from samerun.task import Batch
from samerun.text.titles import teacher_forcing
from samerun.training import train_step

CLASSIFY = classification(5)
TITLES = titles(replace(SEARCH, start_id=1))
SIZES = sizes(64, 3, 4, 128, 300)
ALONE, ON_GPU = Layout(Launch()), Layout(Launch(use_cpu=False))


def on_gpus(processes, precision="bf16", zero=None):
    """The layout of this launch; `zero`: of DeepSpeed's file."""
    config = None if zero is None else {"zero_optimization": zero}
    return Layout(Launch(world_size=processes, precision=precision, use_cpu=False, deepspeed_config=config))


def bert(**changes):
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**{**SIZES, "num_labels": 5, **changes})).train()


def big_bird(**changes):
    torch.manual_seed(0)
    model = big_bird_titles(SIZES | changes, block_size=16, max_position_embeddings=256)
    model.config.pad_token_id, model.config.decoder_start_token_id = 0, 1
    return model.train()


def test_what_a_deepspeed_file_says(request):
    plain = on_gpus(8)

    def shipped(name):
        path = request.config.rootpath / "ds_configs" / f"{name}.json"
        return on_gpus(8, zero=json.loads(path.read_text())["zero_optimization"])

    offloading = [shipped(name) for name in ("zero3", "zero2_offload", "zero3_offload")]
    assert [layout.offload_optimizer for layout in offloading] == [False, True, True]
    assert [layout.offload_parameters for layout in offloading] == [False, False, True]
    unset = on_gpus(8, zero={"stage": 3, "offload_optimizer": None, "offload_param": {"device": "none"}})
    assert not unset.offload_optimizer | unset.offload_parameters
    # One bucket of 5e7 numbers in half precision, two that overlap, and a model that is whole in a pass.
    sizes = DryRun(10**8, 10**8, 10**6, 0, 0, 0, "1x1")
    exchanged = [estimate(sizes, shipped(f"zero{n}")).exchange for n in (1, 2, 3)]
    assert exchanged == [10**8, 2 * 10**8, 10**8 + 2 * 10**8]
    assert (plain.autocast, plain.own_precision) == (torch.bfloat16, None)
    assert (shipped("zero2").autocast, shipped("zero2").own_precision) == (None, torch.bfloat16)


def test_the_layout_of_a_launch():
    assert Layout(Launch(launcher="torchrun")).wrapped
    assert not ALONE.wrapped
    found = Layout(Launch(fsdp=FsdpSettings(offload_params=True), precision="bf16"))
    assert found.offload_parameters
    assert found.offload_optimizer
    # Gathered in it, and computed as under DDP.
    assert found.own_precision == found.autocast == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_training_step_takes_what_was_estimated(arguments, start_run, accumulation, monkeypatch):
    # What threads keep is as small beside this small model as it is beside one of the usual size.
    monkeypatch.setattr(samerun.kernels.dropout, "WEIGHTS_AT_ONCE", 500)
    model, batch = bert(), text_batch(4, 32)
    shape = BatchShape(4 * accumulation, 1, 4, accumulation)
    run = start_run(shape)
    layout = Layout(run.launch, accumulation)
    expected = estimate(dry_run(model, CLASSIFY, batch, layout), layout)
    weights = sum(x.numel() * x.element_size() for x in [*model.parameters(), *model.buffers()])
    model, optimizer = run.accelerator.prepare(
        model, build_optimizer(arguments(), model, 1e-3, lambda *_: 1.0)
    )

    def step():
        train_step(run, model, optimizer, CLASSIFY, [batch] * accumulation, 1.0)

    step()
    moments = sum(
        x.numel() * x.element_size() for s in optimizer.optimizer.state.values() for x in s.values()
    )
    assert expected.weights == weights
    assert expected.optimizer == pytest.approx(moments, rel=0.01)
    assert weights + moments + peak_bytes(step, model) == pytest.approx(expected.peak, rel=0.01)


def test_frozen_weights_have_neither_gradients_nor_moments():
    model = bert()
    model.bert.requires_grad_(False)
    found = estimate(dry_run(model, CLASSIFY, text_batch(4, 32), ALONE), ALONE)
    head = sum(parameter.numel() for parameter in model.classifier.parameters())
    assert (found.gradients, found.optimizer) == (4 * head, 8 * head)
    assert found.weights > 4 * sum(parameter.numel() for parameter in model.bert.parameters())


def test_the_states_of_the_zero_paper():
    """arXiv:1910.02054, figure 1: 7.5 billion parameters on 64 GPUs, in decimal gigabytes."""
    r = DryRun(7_500_000_000, 7_500_000_000, 10**6, 0, 0, 0, "1x1")

    def states(stage):
        e = estimate(r, on_gpus(64, "fp16", {"stage": stage, "reduce_bucket_size": 1}))
        return (e.weights + e.gradients + e.optimizer) / 1e9

    assert [states(stage) for stage in (1, 2, 3)] == pytest.approx([31.4, 16.6, 1.9], abs=0.05)
    # The paper's 120 GB of plain data parallelism keep a half-precision weight and gradient beside the fp32
    # ones. Autocast has neither, but fp32 gradients: the same 16 bytes a parameter.
    plain = estimate(r, on_gpus(64, "fp16"))
    assert (plain.weights + plain.gradients + plain.optimizer) / 1e9 == pytest.approx(120)


# (processes, launch, precision, accumulation): bytes per parameter at the worst moment of the third step on
# CPUs, with DeepSpeed 0.19.8, the files in ds_configs/ with buckets of 200,000 numbers, and FSDP2 of torch
# 2.13, which gathers weights again in the backward pass or keeps them. A BERT of 3,329,542 parameters over
# 2 x 47 tokens a pass (1 x 47 where it accumulates, and on four processes).
MEASURED = {
    (2, "ddp", "no", 1): 18.34, (2, "ddp", "bf16", 2): 22.71,
    (2, "zero1", "no", 1): 16.06, (2, "zero1", "bf16", 2): 12.21,
    (2, "zero2", "bf16", 1): 12.00, (2, "zero2", "no", 2): 16.53,
    (2, "zero3", "no", 1): 16.70, (2, "zero3", "bf16", 2): 11.53,
    (2, "zero2_offload", "no", 1): 18.61, (2, "zero2_offload", "bf16", 2): 15.03,
    (2, "zero3_offload", "no", 1): 20.35, (2, "zero3_offload", "bf16", 1): 13.51,
    (2, "fsdp", "no", 1): 12.98, (2, "fsdp", "no", 2): 14.47, (2, "fsdp", "bf16", 2): 13.14,
    (2, "fsdp_keeps", "no", 1): 13.37,
    (4, "ddp", "no", 1): 17.32, (4, "zero1", "bf16", 1): 7.56, (4, "zero2", "bf16", 1): 7.54,
    (4, "zero3", "no", 1): 10.97, (4, "zero3", "bf16", 1): 6.99,
}  # fmt: skip
DRY_RUNS = {}  # those of layouts that differ only in what the estimate makes of them are the same


@pytest.mark.parametrize(("processes", "name", "precision", "accumulation"), MEASURED)
def test_launches_that_were_measured(request, processes, name, precision, accumulation):
    numbers, rows = 3_329_542, 2 if processes == 2 and accumulation == 1 else 1
    launch = Launch(world_size=processes, precision=precision)
    if name.startswith("fsdp"):
        launch = replace(launch, fsdp=FsdpSettings(reshard_after_forward=name == "fsdp"))
    elif name != "ddp":
        config = json.loads((request.config.rootpath / "ds_configs" / f"{name}.json").read_text())
        config["zero_optimization"]["reduce_bucket_size"] = 200_000
        launch = replace(launch, deepspeed_config=config)
    layout = Layout(launch, accumulation)
    key = rows, layout.autocast, layout.own_precision, launch.fsdp is None
    if key not in DRY_RUNS:
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        with torch.device("meta"):
            model = bert(**sizes(256, 4, 4, 1024, 271), **dropout, max_position_embeddings=128, num_labels=6)
        assert sum(p.numel() for p in model.parameters()) == numbers
        batch = text_batch(rows, 47, torch.ones(rows, 6))
        DRY_RUNS[key] = dry_run(model, classification(6), batch, layout)
    found = estimate(DRY_RUNS[key], layout)
    tolerance = 0.13 if name.startswith("fsdp") else 0.1
    measured = pytest.approx(MEASURED[processes, name, precision, accumulation], rel=tolerance)
    assert (found.peak + found.host) / numbers == measured


def test_what_a_run_says():
    r = DryRun(10**8, 10**8, 10**6, 0, 2 * GIB, 2 * GIB, "16x512")
    lines = memory_lines(r, on_gpus(8))
    assert lines == [
        "memory         about 3.49 GiB of tensors per GPU, for micro-batches of 16x512",
        "               (weights 0.37, gradients 0.37, optimizer 0.75, activations 2.00; not all at once)",
    ]
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000}
    offloaded = on_gpus(8, zero=zero)
    assert memory_lines(r, offloaded)[-1] == "               and 0.21 GiB of host memory per process"
    e = estimate(r, offloaded)
    assert e.optimizer == 0
    assert e.needed > e.peak + OUTSIDE_TENSORS


@pytest.mark.parametrize("given", [{"quantize": "4"}, {"quantize": "8"}], ids=["4 bits", "8 bits"])
def test_weights_in_few_bits_are_counted_as_what_they_will_take(arguments, given):
    model = limit_training(
        bert(hidden_size=256), arguments(lora_r=2, model_name_or_path="base", **given), set()
    )
    found = estimate(dry_run(model, CLASSIFY, text_batch(4, 32), ALONE), ALONE)
    plain = sum(parameter.nbytes for parameter in model.parameters())
    rounded = [layer for layer in model.to("cpu").modules() if hasattr(layer, "bytes_per_element")]
    if given["quantize"] == "4":
        states = [item for layer in rounded for item in layer.weight.quant_state.as_dict().items()]
        scales = [x for name, x in states if "map" not in name and isinstance(x, torch.Tensor)]
    else:
        scales = [layer.weight.SCB for layer in rounded]
    assert found.weights < 0.6 * plain
    held = sum(x.nbytes for x in [*model.parameters(), *model.buffers(), *scales])
    assert found.weights == pytest.approx(held, rel=0.01)


def forward_and_backward(model, task, batch, autocast):
    with (
        dropout_by_row(batch.lengths, batch.places),
        torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None),
    ):
        outputs = model(
            **batch.inputs, **(teacher_forcing(batch.labels, task.generation) if task is TITLES else {})
        )
    # The forward pass is given to the task as done, as Accelerate's wrapper of it would return it.
    logits = SimpleNamespace(logits=outputs.logits.float())
    del outputs
    task.loss_sum(lambda **_: logits, batch).backward()


# The greatest errors measured, with room for a library's next version; benchmarks/notes.md has the table.
@pytest.mark.parametrize(
    ("checkpointing", "precision", "tolerance"),
    [(False, "no", 0.005), pytest.param(False, "bf16", 0.02, marks=pytest.mark.slow), (True, "no", 0.01)],
)
def test_a_pass_takes_what_the_dry_run_counted(checkpointing, precision, tolerance):
    model, batch = bert(), text_batch(6, 48)
    if checkpointing:
        checkpoint_activations(model, dropout_by_row=True)
    layout = Layout(Launch(precision=precision))
    found = dry_run(model, CLASSIFY, batch, layout)
    forward_and_backward(model, CLASSIFY, batch, layout.autocast)  # caches and workspaces
    measured = peak_bytes(lambda: forward_and_backward(model, CLASSIFY, batch, layout.autocast), model)
    assert found.with_gradients == pytest.approx(measured, rel=tolerance)
    assert found.activations <= found.with_gradients


def test_big_birds_attention_on_a_gpu_is_counted(monkeypatch):
    """A CPU computes it here, in pieces as large as a GPU's."""
    model = big_bird(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # a GPU keeps other masks
    batch = title_batch(4, 256, 12)
    found = dry_run(model, TITLES, batch, ON_GPU).with_gradients
    monkeypatch.setattr(block_attention, "on_cpu", lambda _: False)
    forward_and_backward(model, TITLES, batch, None)
    measured = peak_bytes(lambda: forward_and_backward(model, TITLES, batch, None), model)
    assert found == pytest.approx(measured, rel=0.02)


def test_what_the_loss_does_not_depend_on_is_named_and_the_model_is_left_as_it_was():
    model = big_bird(num_hidden_layers=1).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state()
    found = dry_run(model, TITLES, title_batch(2, 256, 12), ON_GPU)
    assert found.unused == {name for name in before if "encoder.pooler" in name} != set()
    pooler = sum(parameter.numel() for parameter in model.encoder.pooler.parameters())
    assert found.parameters - found.trainable == pooler
    assert torch.equal(torch.get_rng_state(), states)
    assert not any(module.training for module in model.modules())
    after = model.state_dict()
    assert {name: type(tensor) for name, tensor in after.items()} == dict.fromkeys(before, torch.Tensor)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
    # Attention caches hold no meta tensor.
    forward_and_backward(model.train(), TITLES, title_batch(2, 256, 12), None)
    assert all(p.grad is None or type(p.grad) is torch.Tensor for p in model.parameters())


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_layers_that_a_model_skips_at_random_are_not_called_unused(draw):
    class SkipsAtRandom(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.always(x)
            return x if draw() < 2 else self.sometimes(x)

    task = SimpleNamespace(loss_sum=lambda model, batch: model(**batch.inputs).sum())
    state = random.getstate(), str(np.random.get_state())
    found = dry_run(SkipsAtRandom(), task, Batch(torch.arange(2), {"x": torch.ones(2, 4)}, None), ALONE)
    assert found.unused == frozenset()
    assert (random.getstate(), str(np.random.get_state())) == state


def test_a_layer_that_only_some_batches_call_is_not_left_out_silently():
    class ByLength(nn.Module):
        def __init__(self):
            super().__init__()
            self.short, self.long, self.pooler = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            self.pooler(x)
            return self.long(x) if len(x) > 2 else self.short(x)

    model, task = ByLength(), SimpleNamespace(loss_sum=lambda model, batch: model(**batch.inputs).sum())
    found = dry_run(model, task, Batch(torch.arange(3), {"x": torch.ones(3, 4)}, None), ALONE)
    assert found.uncalled == {"short.weight", "short.bias"}
    assert found.unused == found.uncalled | {"pooler.weight", "pooler.bias"}
    freeze_unused(model, found)
    assert {name for name, x in model.named_parameters() if x.requires_grad} == {"long.weight", "long.bias"}
    model(torch.ones(3, 4))
    with pytest.raises(TrainingError, match=r"this batch uses short\.\w+, which was frozen"):
        model(torch.ones(2, 4))
    model.eval()(torch.ones(2, 4))


def test_a_layer_in_half_precision_takes_what_a_published_formula_says():
    """Korthikanti et al., arXiv:2205.05198, section 4.1: sbh (34 + 5 a s / h) bytes a layer, and without the
    scores of attention sbh 34: of which attention is 11, the other two matrices 19, the norms 4. In BERT the
    sum before a norm is no more needed, so 2 of the 34 are not there; the intermediate size is 4 h."""
    rows, width, hidden = 4, 128, 64
    layout = on_gpus(2, zero={"stage": 2})
    batch = text_batch(rows, width)
    batch = Batch(batch.rows, {"input_ids": batch.inputs["input_ids"]}, batch.labels)
    few, many = (bert(num_hidden_layers=n, intermediate_size=4 * hidden, vocab_size=300) for n in (1, 2))
    found = (
        dry_run(many, CLASSIFY, batch, layout).activations - dry_run(few, CLASSIFY, batch, layout).activations
    )
    assert found == pytest.approx(rows * width * hidden * 34, rel=0.1)


def image_loss(model, batch):
    return functional.cross_entropy(model(batch.inputs["pixels"]).float(), batch.labels, reduction="sum")


@lru_cache
def positions(length):
    return torch.arange(length) / length


def _wrapped(function):
    """As transformers wraps what torch's compiler must see through."""
    kept = lru_cache(function)
    return wraps(function)(lambda length: kept(length))


places = _wrapped(lambda length: torch.arange(length) / length)


class ImageModel(nn.Module):
    """A module with buffers, whose functions keep what they computed."""

    def __init__(self):
        super().__init__()
        features = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.layers = nn.Sequential(*features, nn.Linear(8, 5))

    def forward(self, pixels):
        length = pixels.shape[-1]
        return self.layers(pixels + (positions(length) + places(length)).to(pixels.dtype))


def test_images_through_a_module_with_buffers():
    images = Batch(torch.arange(4), {"pixels": torch.rand(4, 3, 24, 18)}, torch.arange(4))
    model, task = ImageModel(), SimpleNamespace(loss_sum=image_loss)
    found = dry_run(model, task, images, ALONE)
    task.loss_sum(model, images).backward()  # no function has kept a tensor of the dry run
    assert all(parameter.grad.abs().sum().isfinite() for parameter in model.parameters())
    assert type(positions(18)) is type(places(18)) is torch.Tensor
    measured = peak_bytes(lambda: task.loss_sum(model, images).backward(), model)
    assert found.with_gradients == pytest.approx(measured, rel=0.02)
    assert found.input_size == "4x3x24x18"
    for zero in (None, {"stage": 2}):
        on_gpu = on_gpus(1, zero=zero)
        for layout in (on_gpu, Layout(replace(on_gpu.launch, use_cpu=True))):
            assert dry_run(model, task, images, layout).activations < found.activations
