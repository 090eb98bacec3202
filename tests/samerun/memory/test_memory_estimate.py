"""The estimate against the allocator, against launches that were measured, and against published formulas."""

import json

import pytest
import torch
from memory_models import ALONE, CLASSIFY, bert, peak_bytes, text_batch
from text_tasks import classification

import samerun.kernels.dropout
from samerun.fsdp import FsdpSettings
from samerun.kernels import embeddings
from samerun.memory.dry_run import DryRun, dry_run
from samerun.memory.estimate import GIB, OUTSIDE_TENSORS, estimate, memory_lines, needed
from samerun.memory.layout import Layout, layout_of, with_fsdp, with_zero
from samerun.models.adapters import limit_training
from samerun.optimizer import build_optimizer
from samerun.plan import BatchShape
from samerun.train import train_step


@pytest.mark.slow
# `large`: numbers in the vocabulary's weight here, whose gradient is kept or not.
@pytest.mark.parametrize(("accumulation", "large"), [(1, 300 * 64), (2, embeddings.LARGE)])
@pytest.mark.usefixtures("one_thread")
def test_a_training_step_takes_what_was_estimated(arguments, start_run, accumulation, large, monkeypatch):
    monkeypatch.setattr(embeddings, "LARGE", large)
    # What threads keep is as small beside this small model as it is beside one of the usual size.
    monkeypatch.setattr(samerun.kernels.dropout, "WEIGHTS_AT_ONCE", 500)
    model, batch = bert(), text_batch(4, 32)
    shape = BatchShape(4 * accumulation, 1, 4, accumulation)
    run = start_run(shape)
    expected = estimate(
        dry_run(model, CLASSIFY, batch, layout_of(run.launch, shape)), layout_of(run.launch, shape)
    )
    weights = sum(x.numel() * x.element_size() for x in [*model.parameters(), *model.buffers()])
    kept = sum(weight.nbytes for weight in embeddings.reuse_gradient_memory(model))
    assert (kept > 0) == (large == 300 * 64)
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
    assert weights + moments + kept + peak_bytes(step, model) == pytest.approx(expected.peak, rel=0.01)


def test_frozen_weights_have_neither_gradients_nor_moments():
    model = bert()
    model.bert.requires_grad_(False)
    found = estimate(dry_run(model, CLASSIFY, text_batch(4, 32), ALONE), ALONE)
    head = sum(parameter.numel() for parameter in model.classifier.parameters())
    assert (found.gradients, found.optimizer) == (4 * head, 8 * head)
    assert found.weights > 4 * sum(parameter.numel() for parameter in model.bert.parameters())


def test_the_states_of_the_zero_paper():
    """arXiv:1910.02054, figure 1: 7.5 billion parameters on 64 GPUs, in decimal gigabytes."""
    r = DryRun(7_500_000_000, 7_500_000_000, 10**6, 0, 0, 0, (1, 1))

    def states(stage):
        e = estimate(r, Layout(64, "fp16", True, 1, True, stage, bucket_size=1))
        return (e.weights + e.gradients + e.optimizer) / 1e9

    assert [states(stage) for stage in (1, 2, 3)] == pytest.approx([31.4, 16.6, 1.9], abs=0.05)
    # The paper's 120 GB of plain data parallelism keep a half-precision weight and gradient beside the fp32
    # ones. Autocast has neither, but fp32 gradients: the same 16 bytes a parameter.
    plain = estimate(r, Layout(64, "fp16", True, 1, True))
    assert (plain.weights + plain.gradients + plain.optimizer) / 1e9 == pytest.approx(120)


# Two processes on CPUs, DeepSpeed 0.19.8: bytes per parameter at the worst moment of the third step, the
# files in ds_configs/ with buckets of 200,000 numbers. A BERT of 3,329,542 parameters over 2 x 47 tokens a
# pass (1 x 47 where it accumulates).
MEASURED = {
    ("ddp", "no", 1): 18.34,
    ("ddp", "bf16", 1): 19.41,
    ("ddp", "no", 2): 21.21,
    ("ddp", "bf16", 2): 22.71,
    ("zero1", "no", 1): 16.06,
    ("zero1", "bf16", 1): 12.00,
    ("zero1", "no", 2): 16.06,
    ("zero1", "bf16", 2): 12.21,
    ("zero2", "no", 1): 14.01,
    ("zero2", "bf16", 1): 12.00,
    ("zero2", "no", 2): 16.53,
    ("zero2", "bf16", 2): 12.67,
    ("zero3", "no", 1): 16.70,
    ("zero3", "bf16", 1): 11.47,
    ("zero3", "no", 2): 15.73,
    ("zero3", "bf16", 2): 11.53,
    ("zero2_offload", "no", 1): 18.61,
    ("zero2_offload", "bf16", 1): 13.62,
    ("zero2_offload", "no", 2): 20.64,
    ("zero2_offload", "bf16", 2): 15.03,
    ("zero3_offload", "no", 1): 20.35,
    ("zero3_offload", "bf16", 1): 13.51,
}
# FSDP2, torch 2.13, two processes and the same model: with weights gathered again in the backward pass, and
# kept.
MEASURED_FSDP = {
    ("no", 1, True): 12.98,
    ("bf16", 1, True): 11.63,
    ("no", 2, True): 14.47,
    ("bf16", 2, True): 13.14,
    ("no", 1, False): 13.37,
    ("bf16", 1, False): 11.39,
}
# Four processes, 1 x 47 tokens a pass.
MEASURED_ON_4 = {
    ("ddp", "no"): 17.32, ("zero1", "no"): 12.11, ("zero1", "bf16"): 7.56, ("zero2", "no"): 11.62,
    ("zero2", "bf16"): 7.54,
    ("zero3", "no"): 10.97, ("zero3", "bf16"): 6.99,
}  # fmt: skip


def bytes_per_parameter(root, name, precision, processes, accumulation, rows):
    numbers = 3_329_542
    layout = Layout(processes, precision, False, accumulation, True)
    if name.startswith("fsdp"):
        layout = with_fsdp(layout, FsdpSettings(reshard_after_forward=name == "fsdp"))
    elif name != "ddp":
        config = json.loads((root / "ds_configs" / f"{name}.json").read_text())
        config["zero_optimization"]["reduce_bucket_size"] = 200_000
        layout = with_zero(layout, config)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    with torch.device("meta"):
        model = bert(**sizes, **dropout, vocab_size=271, max_position_embeddings=128, num_labels=6)
    assert sum(p.numel() for p in model.parameters()) == numbers
    batch = text_batch(rows, 47, torch.ones(rows, 6))
    found = estimate(dry_run(model, classification(6), batch, layout), layout)
    return (found.peak + found.host) / numbers


@pytest.mark.parametrize(("name", "precision", "accumulation"), MEASURED)
def test_launches_measured_on_two_processes(request, name, precision, accumulation):
    found = bytes_per_parameter(request.config.rootpath, name, precision, 2, accumulation, 2 // accumulation)
    assert found == pytest.approx(MEASURED[name, precision, accumulation], rel=0.1)


@pytest.mark.parametrize(("precision", "accumulation", "reshards"), MEASURED_FSDP)
def test_fsdp_measured_on_two_processes(request, precision, accumulation, reshards):
    name = "fsdp" if reshards else "fsdp_keeps"
    found = bytes_per_parameter(request.config.rootpath, name, precision, 2, accumulation, 2 // accumulation)
    assert found == pytest.approx(MEASURED_FSDP[precision, accumulation, reshards], rel=0.13)


@pytest.mark.parametrize(("name", "precision"), MEASURED_ON_4)
def test_launches_measured_on_four_processes(request, name, precision):
    found = bytes_per_parameter(request.config.rootpath, name, precision, 4, 1, 1)
    assert found == pytest.approx(MEASURED_ON_4[name, precision], rel=0.1)


def test_what_a_run_says():
    r = DryRun(10**8, 10**8, 10**6, 0, 2 * GIB, 2 * GIB, (16, 512))
    lines = memory_lines(r, Layout(8, "bf16", True, 1, True))
    assert lines == [
        "memory         about 3.49 GiB of tensors per GPU, for micro-batches of 16x512",
        "               (weights 0.37, gradients 0.37, optimizer 0.75, activations 2.00; not all at once)",
    ]
    offloaded = Layout(8, "bf16", True, 1, True, stage=2, offload_optimizer=True, bucket_size=1000)
    assert memory_lines(r, offloaded)[-1] == "               and 0.21 GiB of host memory per process"
    e = estimate(r, offloaded)
    assert e.optimizer == 0
    assert needed(e) > e.peak + OUTSIDE_TENSORS


@pytest.mark.parametrize("given", [{"load_in_4bit": True}, {"load_in_8bit": True}], ids=["4 bits", "8 bits"])
def test_weights_in_few_bits_are_counted_as_what_they_will_take(arguments, given):
    model = limit_training(
        bert(hidden_size=256), arguments(lora_r=2, model_name_or_path="base", **given), set()
    )
    found = estimate(dry_run(model, CLASSIFY, text_batch(4, 32), ALONE), ALONE)
    plain = sum(parameter.nbytes for parameter in model.parameters())
    rounded = [layer for layer in model.to("cpu").modules() if hasattr(layer, "bytes_per_element")]
    states = [
        layer.weight.quant_state.as_dict() if "load_in_4bit" in given else {"": layer.weight.SCB}
        for layer in rounded
    ]
    scales = sum(
        x.nbytes
        for state in states
        for name, x in state.items()
        if "map" not in name and isinstance(x, torch.Tensor)
    )
    assert found.weights < 0.6 * plain
    assert found.weights == pytest.approx(
        sum(x.nbytes for x in [*model.parameters(), *model.buffers()]) + scales, rel=0.01
    )
