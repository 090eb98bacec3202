"""Against plain transformers, which gets one row at a time, padded to that row's own block."""

import copy
import pickle
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tiny_models import sizes
from transformers import (
    BertConfig,
    BertModel,
    BigBirdConfig,
    BigBirdModel,
    BigBirdPegasusConfig,
    BigBirdPegasusForConditionalGeneration,
)

import samerun.kernels.block_attention
from samerun.kernels.bigbird import FastBigBirdAttention, FusedGELU, Shape, read_rows, use_bigbird_attention
from samerun.kernels.common import row_lengths
from samerun.text import text

# Blocks of 4 and 2 random blocks: sparse from 37 tokens (10 blocks) on. Long and short rows, whole and broken
# blocks.
LENGTHS = (61, 37, 20, 100, 40, 62, 3, 36)


def config(**changes):
    sparse = {"block_size": 4, "num_random_blocks": 2, "max_position_embeddings": 128}
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}
    return BigBirdConfig(**{**sizes(32, 2, 4, 48), **sparse, **calm, **changes})


def encoder(**changes):
    torch.manual_seed(0)
    return BigBirdModel(config(**changes), add_pooling_layer=False)


def fast(model):
    twin = copy.deepcopy(model)
    assert use_bigbird_attention(twin)
    return twin


def batch(lengths, width=None, side="right"):
    """Token ids and mask, (rows, width); random ids in the padding too: nobody may look at them."""
    width = width or -(-max(lengths) // 4) * 4
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (len(lengths), width), generator=generator)
    place = torch.arange(width)
    mask = torch.stack([place < n if side == "right" else place >= width - n for n in lengths])
    return ids, mask.long()


def alone(model, ids, mask, row):
    """The real tokens of one row by plain transformers, in a fresh model: it may turn dense for good."""
    end = int(mask[row].nonzero().max()) + 1
    twin = copy.deepcopy(model)
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        ours.data = theirs.data
    states = twin(input_ids=ids[row : row + 1, :end], attention_mask=mask[row : row + 1, :end])[0][0]
    return states[mask[row, :end].bool()], twin


def check_gradients(model, expected, tolerance=1e-4):
    """To `tolerance` of each parameter's largest gradient, or of 1."""
    for name, p in model.named_parameters():
        scale = expected[name].abs().max().clamp(min=1)
        torch.testing.assert_close(p.grad / scale, expected[name] / scale, atol=tolerance, rtol=0, msg=name)
        # The softmax is blind to the keys' bias.
        assert p.grad.abs().max() > 1e-3 or name.endswith("key.bias"), name


def check_rows(model, ids, mask, tolerance=1e-5):
    """Outputs to `tolerance`, gradients of every parameter to ten times that."""
    plain, quick = copy.deepcopy(model), fast(model)
    together = quick(input_ids=ids, attention_mask=mask)[0]
    weights = torch.randn(together.shape, generator=torch.Generator().manual_seed(2))
    (together * weights * mask[..., None]).sum().backward()
    expected = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for row in range(len(ids)):
        real = mask[row].bool()
        states, twin = alone(plain, ids, mask, row)
        torch.testing.assert_close(
            together[row][real], states, atol=tolerance, rtol=0, msg=lambda m, r=row: f"row {r}: {m}"
        )
        (states * weights[row][real]).sum().backward()
        for name, p in twin.named_parameters():
            expected[name] += torch.zeros_like(p) if p.grad is None else p.grad
    check_gradients(quick, expected, 10 * tolerance)


@pytest.mark.parametrize("limit", [1, 3000])
def test_every_row_of_a_mixed_batch_is_as_it_is_alone(limit, threads, monkeypatch):
    # However the work is cut: single blocks, several blocks, several heads, everything at once.
    for name in ("SCORES_PER_THREAD", "PORTION"):
        monkeypatch.setattr(samerun.kernels.block_attention, name, limit)
    check_rows(encoder().train(threads == 3), *batch(LENGTHS))


@pytest.mark.parametrize("lengths", [(37,), (61, 64, 62), (101, 101), (36, 5), (128,)])
@pytest.mark.parametrize(("number", "training"), [(1, True), (3, False)])
def test_one_and_several_rows_of_a_kind(lengths, number, training):
    check_rows(encoder(num_random_blocks=number).train(training), *batch(lengths))


def test_lengths_with_the_papers_plan():
    # 1024 tokens are planned in another way than their neighbours.
    model = encoder(block_size=64, num_random_blocks=3, max_position_embeddings=1088, num_hidden_layers=1)
    check_rows(model.train(), *batch((1024, 1000, 900, 1025), 1088), tolerance=2e-5)


def bigbird_pegasus():
    torch.manual_seed(0)
    given = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "d_model": 32}
    given |= {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "vocab_size": 60}
    given |= {"block_size": 4, "num_random_blocks": 2, "max_position_embeddings": 128, "init_std": 0.3}
    calm = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return BigBirdPegasusForConditionalGeneration(BigBirdPegasusConfig(**given, **calm)).get_encoder()


OTHER = {"num_random_blocks": 1, "max_position_embeddings": 192, "use_bias": False}


@pytest.mark.parametrize("training", [True, False])
def test_other_encoders_sides_and_holes(training):
    model = encoder(block_size=8 if training else 16, **OTHER)
    check_rows(model.train(training), *batch((150, 64, 129, 130, 33), 160))
    check_rows(bigbird_pegasus().train(training), *batch(LENGTHS))
    ids, mask = batch((100, 61, 80), side="left")
    mask[2, 30:50] = 0
    check_rows(encoder().train(training), ids, mask)


@pytest.mark.parametrize("training", [True, False])
def test_tokens_that_fill_up_a_block_are_as_in_transformers(training):
    # Nobody sees them, but a loss over every position does: their context is 0 and takes no gradient.
    model = encoder().train(training)
    quick = fast(model)
    ids, mask = batch((62, 61))
    ours, theirs = (m(input_ids=ids, attention_mask=mask)[0] for m in (quick, model))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    for states in (ours, theirs):
        (states * weights).sum().backward()
    check_gradients(quick, {name: p.grad for name, p in model.named_parameters()})


def test_a_row_that_is_all_padding_harms_nothing():
    model = fast(encoder()).train()
    ids, mask = batch((61, 50))
    expected = model(input_ids=ids, attention_mask=mask)[0][0]
    mask[1] = 0
    states = model(input_ids=ids, attention_mask=mask)[0]
    states.sum().backward()
    torch.testing.assert_close(states[0], expected)
    assert states.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_groups_by_row_lengths_are_those_of_the_mask():
    mask = batch(LENGTHS)[1]
    shape = Shape(heads=1, num_random_blocks=2, block_size=4, positions=128)
    by_mask = read_rows(mask, shape)
    with row_lengths(LENGTHS):
        by_lengths = read_rows(mask, shape)
    for (ours, our_rows), (theirs, their_rows) in zip(by_lengths.groups, by_mask.groups, strict=True):
        assert ours == theirs
        assert torch.equal(our_rows, their_rows)


def test_a_narrow_batch_turns_nothing_dense():
    model = encoder().train()
    quick = fast(model)
    narrow, long = batch((20, 7)), batch((61,))
    before = quick(input_ids=long[0], attention_mask=long[1])[0]
    short = quick(input_ids=narrow[0], attention_mask=narrow[1])[0]
    assert quick.attention_type == quick.config.attention_type == "block_sparse"
    torch.testing.assert_close(quick(input_ids=long[0], attention_mask=long[1])[0], before, atol=0, rtol=0)
    torch.testing.assert_close(short[1, :7], alone(model, *narrow, 1)[0], atol=1e-5, rtol=0)
    # The test would notice: full attention gives the long row something else.
    model(input_ids=narrow[0], attention_mask=narrow[1])
    assert model.attention_type == "original_full"
    assert (model(input_ids=long[0], attention_mask=long[1])[0] - before).abs().max() > 1e-2


def test_training_leaves_numpys_generator_alone_and_plans_once(monkeypatch):
    model = fast(encoder(num_attention_heads=2)).train()  # two heads: planned in no other test
    _, before, position, *_ = np.random.get_state()
    before = before.copy()
    ids, mask = batch((61, 100))
    first = model(input_ids=ids, attention_mask=mask)[0]
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    assert np.random.get_state()[2] == position
    monkeypatch.setattr(np.random, "seed", None)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask)[0], first, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_half_precision_is_near_fp32(dtype, training):
    ids, mask = batch(LENGTHS)
    model = fast(encoder(initializer_range=0.1)).train(training)
    expected = model(input_ids=ids, attention_mask=mask)[0]
    expected.square().mean().backward()
    half = fast(encoder(initializer_range=0.1)).train(training).to(dtype)
    states = half(input_ids=ids, attention_mask=mask)[0]
    assert states.dtype == dtype
    states.float().square().mean().backward()
    tolerance = 0.2 if dtype == torch.bfloat16 else 0.03
    assert ((states - expected) * mask[..., None]).abs().max() < tolerance
    for ours, theirs in zip(half.parameters(), model.parameters(), strict=True):
        assert ours.grad.isfinite().all()
        assert (ours.grad - theirs.grad).norm() <= tolerance * theirs.grad.norm() + 1e-3


def test_the_state_dict_is_that_of_transformers(tmp_path):
    model = encoder()
    quick = fast(model)
    assert use_bigbird_attention(quick)  # a second time changes nothing
    ours, theirs = quick.state_dict(), model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    quick.save_pretrained(tmp_path)
    loaded = BigBirdModel.from_pretrained(tmp_path, add_pooling_layer=False)
    assert loaded.config.attention_type == "block_sparse"
    assert loaded.config.architectures == ["BigBirdModel"]
    ids, mask = batch((61,))
    expected = quick.eval()(input_ids=ids, attention_mask=mask)[0]
    torch.testing.assert_close(loaded(input_ids=ids, attention_mask=mask)[0], expected, atol=1e-5, rtol=0)
    again = pickle.loads(pickle.dumps(quick))
    assert torch.equal(again(input_ids=ids, attention_mask=mask)[0], expected)


def kinds(model):
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_task_uses_it(on_cpu, monkeypatch):
    monkeypatch.setattr(text, "use_first_token", cut := Mock())
    task = SimpleNamespace(
        # With transformers' own, results would depend on the batch, and on batches before a resume.
        arguments=SimpleNamespace(attn_implementation="eager", layerwise_lr_decay=None),
        launch=SimpleNamespace(use_cpu=on_cpu),
        tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 1}, padding_side="right"),
        long_documents=SimpleNamespace(prepare=lambda model, side: model),
    )
    model = text.TextTask.with_kernels(task, encoder())
    assert {FastBigBirdAttention, FusedGELU} <= set(kinds(model))
    assert cut.called == on_cpu


def test_only_block_sparse_encoders_are_touched():
    assert not use_bigbird_attention(BertModel(BertConfig(**sizes(32, 1, 4, 48))))
    full = encoder(attention_type="original_full")
    before = kinds(full)
    assert not use_bigbird_attention(full)
    assert kinds(full) == before
