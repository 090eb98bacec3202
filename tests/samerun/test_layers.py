import copy
import functools
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tiny_models import CLASSIFY, KINDS, TITLES, build, collator
from torch._dynamo.testing import CompileCounter
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from samerun.errors import InputError
from samerun.kernels import common as row_lengths
from samerun.layers import checkpoint_activations, compile_layers, switch_off_randomness


def test_a_model_that_cannot():
    refuse = Mock(side_effect=ValueError("Model does not support gradient checkpointing."))
    with pytest.raises(InputError, match="--gradient_checkpointing: Model does not support"):
        checkpoint_activations(SimpleNamespace(gradient_checkpointing_enable=refuse))


def test_all_layers_of_a_model_with_layerdrop_are_trained():
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"vocab_size": 60, "d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    config = BartConfig(**sizes, encoder_layerdrop=1.0, decoder_layerdrop=1.0)
    model, ids = BartForConditionalGeneration(config).train(), torch.arange(6).view(2, 3)

    def unused():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [name for name, parameter in model.named_parameters() if parameter.grad is None]

    assert unused() != []
    assert switch_off_randomness(model) == ["LayerDrop"]
    assert unused() == []
    assert model.config.encoder_layerdrop == 1
    assert switch_off_randomness(model) == []


def test_the_noise_of_routers_is_off():
    sizes = {"vocab_size": 20, "d_model": 8, "d_ff": 8, "num_layers": 2, "num_heads": 2, "d_kv": 4}
    config = SwitchTransformersConfig(**sizes, num_experts=2, router_jitter_noise=0.5, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    model, ids = SwitchTransformersForConditionalGeneration(config).train(), torch.arange(6).view(2, 3)
    assert switch_off_randomness(model) == ["routers' noise"]
    losses = [model(input_ids=ids, labels=ids).loss.item() for _ in range(2)]
    assert losses[0] == losses[1]


@pytest.fixture
def counter(monkeypatch):
    """Counts what is compiled; each piece is traced as for real, but computed by torch's own kernels."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    yield counter
    torch._dynamo.reset()


def quiet(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config.attention_probs_dropout_prob = 0.0
    return model


def passes(kind):
    """Batches of one row to five."""
    task, longest, multiple = KINDS[kind]
    collate = collator(np.linspace(longest // 4, longest, 12).astype(int), multiple, task is TITLES)
    numbers = np.random.default_rng(0)
    return [collate(numbers.choice(12, size=rows, replace=False)) for rows in (3, 2, 1, 4, 5, 1)]


def compiled_twin(model):
    twin = copy.deepcopy(model)
    compile_layers(twin)
    return twin


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "blocks"])
def test_a_layer_is_compiled_once_for_all_batches(kind, counter):
    task, model = KINDS[kind][0], quiet(build(kind))
    twin = compiled_twin(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    pieces = []
    for batch in passes(kind):
        with row_lengths.row_lengths(batch.lengths):
            losses = [task.loss_sum(x, batch) for x in (model, twin)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
        pieces.append(counter.frame_count)
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    # A single row has code of its own in torch; so have titles of equal length, whose mask transformers
    # leaves out.
    assert pieces[0] > 0
    assert pieces[-1] == pieces[2] < 3 * pieces[0]


def steps_back(loss):
    found, waiting = {}, [loss.grad_fn]
    while waiting:
        step = waiting.pop()
        if step is not None and step not in found:
            found[step] = step.name()
            waiting += [below for below, _ in step.next_functions]
    return list(found.values())


@pytest.mark.slow
def test_each_layer_has_a_backward_pass_of_its_own(monkeypatch):
    """So that DDP exchanges its gradients while those of lower layers are computed."""
    # aot_eager makes one backward pass of each compiled piece, as the default does, without its kernels.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = quiet(build("padded"))
    compile_layers(model)
    loss = CLASSIFY.loss_sum(model, passes("padded")[0])
    assert steps_back(loss).count("CompiledFunctionBackward") == model.config.num_hidden_layers > 1


def test_a_search_for_titles_is_not_compiled(counter):
    model = build("titles").eval()
    twin = compiled_twin(model)
    ids = torch.randint(3, 60, (2, 12))
    read = functools.partial(model.encoder, input_ids=ids, attention_mask=torch.ones_like(ids))
    asked = {"max_length": 6, "num_beams": 2, "do_sample": False}
    asked |= {"decoder_start_token_id": 1, "pad_token_id": 0}
    found = [
        x.generate(ids, attention_mask=torch.ones_like(ids), encoder_outputs=read(), **asked)
        for x in (model, twin)
    ]
    assert torch.equal(*found)
    assert counter.frame_count == 0
