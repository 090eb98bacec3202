"""FlexAttention by torch's reference for a CPU, against gathered blocks and plain transformers. tests/gpu/
has the kernels."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from test_attention import LENGTHS, batch, check_rows, encoder, fast
from torch._inductor.choices import InductorChoices
from torch.nn.attention import flex_attention as torchs

import samerun.kernels.bigbird.flex
import samerun.kernels.bigbird.layers
from samerun.kernels.bigbird.flex import Plans, attend
from samerun.kernels.bigbird.flex_tiles import SmallTiles, shrink
from samerun.kernels.bigbird.layers import use_bigbird_attention
from samerun.kernels.bigbird.plan import Shape, random_blocks, shortest_sparse
from samerun.kernels.row_lengths import row_lengths

CPU = torch.device("cpu")


@pytest.fixture
def reference(monkeypatch):
    """torch computes it on a CPU, backward too, from the same plans; blocks may be small. Anew after each
    test."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    samerun.kernels.bigbird.flex.is_usable.cache_clear()
    yield
    samerun.kernels.bigbird.flex.is_usable.cache_clear()


@pytest.fixture
def calls(reference, monkeypatch):
    """Has the layers use it here; a list of the calls."""
    found = []

    def attend(*inputs):
        found.append(inputs)
        return samerun.kernels.bigbird.flex.attend(*inputs)

    monkeypatch.setattr(samerun.kernels.bigbird.layers, "FLEX_DEVICES", ("cpu",))
    monkeypatch.setattr(samerun.kernels.bigbird.layers, "TILE", 1)
    monkeypatch.setattr(samerun.kernels.bigbird.layers, "is_usable", lambda *_: True)
    monkeypatch.setattr(samerun.kernels.bigbird.layers, "attend", attend)
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [LENGTHS, (37,), (101, 101), (36, 5), (128, 64)])
def test_every_row_is_as_transformers_computes_it_alone(training, lengths, calls):
    with row_lengths(lengths):
        check_rows(encoder().train(training), *batch(lengths))
    assert len(calls) == 2  # layers


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("number", "block_size"), [(1, 8), (3, 4)])
def test_other_sizes(training, number, block_size, calls):
    model = encoder(num_random_blocks=number, block_size=block_size, max_position_embeddings=160).train(
        training
    )
    lengths = (150, 64, 129, 33)
    with row_lengths(lengths):
        check_rows(model, *batch(lengths, 152))
    assert calls


# The paper's plan for 1024 tokens has blocks that a query sees twice.
@pytest.mark.parametrize("lengths", [(705, 1024), pytest.param((4096,), marks=pytest.mark.slow)])
@pytest.mark.parametrize("training", [True, False])
def test_blocks_of_64_are_those_that_are_gathered(lengths, training, calls):
    sizes = {"block_size": 64, "num_random_blocks": 3, "max_position_embeddings": 4096}
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    model = fast(encoder(**sizes, **small)).train(training)
    ids, mask = batch(lengths, -(-max(lengths) // 64) * 64)
    weights = torch.randn(*ids.shape, 16, generator=torch.Generator().manual_seed(2))
    results = []
    for known in (lengths, None):
        model.zero_grad()
        with row_lengths(known):
            states = model(input_ids=ids, attention_mask=mask)[0]
        (states * weights * mask[..., None]).sum().backward()
        results.append((states.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    assert len(calls) == 1
    (ours, gradients), (theirs, expected) = results
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    for name, other in expected.items():
        if not name.endswith(
            "key.bias"
        ):  # softmax is blind to it: nothing but rounding, of thousands of tokens
            scale = other.abs().max().clamp(min=1)
            torch.testing.assert_close(gradients[name] / scale, other / scale, atol=1e-4, rtol=0, msg=name)


def test_checkpointing_dropout_and_bf16(calls):
    ids, mask = batch(LENGTHS)
    found = []
    for checkpointing in (False, True):
        model = fast(encoder(hidden_dropout_prob=0.1, initializer_range=0.1)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        with row_lengths(LENGTHS), torch.autocast("cpu", torch.bfloat16):
            states = model(input_ids=ids, attention_mask=mask)[0]
        (states.float() * mask[..., None]).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert len(calls) == 2 + 2 + 2
    assert {x.dtype for x in calls[0][:3]} == {torch.bfloat16}
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@pytest.mark.parametrize("mode", ["checkpointing", "reentrant", "inference"])
def test_a_first_pass_of_any_kind_tries_it_out(mode, reference, monkeypatch):
    monkeypatch.setattr(samerun.kernels.bigbird.layers, "FLEX_DEVICES", ("cpu",))
    monkeypatch.setattr(samerun.kernels.bigbird.layers, "TILE", 1)
    small = samerun.kernels.bigbird.flex.SHAPE._replace(block_size=8, positions=128)
    for name, value in (("TILE", 8), ("SHAPE", small), ("CASES", (((99, 60), True),))):
        monkeypatch.setattr(samerun.kernels.bigbird.flex, name, value)
    model = fast(encoder(num_hidden_layers=1)).train(mode != "inference")
    ids, mask = batch((61, 40))
    expected = model(input_ids=ids, attention_mask=mask)[0]
    if mode != "inference":
        model.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
        model.enable_input_require_grads()
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    with row_lengths((61, 40)), torch.inference_mode(mode == "inference"), warnings.catch_warnings():
        warnings.filterwarnings("error", message="FlexAttention")
        states = model(input_ids=ids, attention_mask=mask)[0]
    if mode != "inference":
        states.sum().backward()
    assert samerun.kernels.bigbird.flex.is_usable.cache_info().misses == 1
    assert torch.equal(torch.rand(1), drawn)  # the run's generator is left alone
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=0)


def test_what_it_is_not_used_for(calls):
    ids, mask = batch((61, 40))
    model = encoder().eval()
    gathered, untouched = copy.deepcopy(model), copy.deepcopy(model)
    assert use_bigbird_attention(gathered, "blocks")
    assert not use_bigbird_attention(untouched, "transformers")
    assert [type(m) for m in untouched.modules()] == [type(m) for m in model.modules()]
    with row_lengths((61, 40)):
        expected = gathered(input_ids=ids, attention_mask=mask)[0]
    torch.testing.assert_close(
        fast(model)(input_ids=ids, attention_mask=mask)[0], expected, atol=1e-6, rtol=0
    )
    holed = mask.clone()
    holed[0, 9] = 0
    fast(model)(input_ids=ids, attention_mask=holed)  # nobody says how long the rows are
    assert calls == []


SHAPE = Shape(seeds=(3, 5), heads=2, num_random_blocks=2, block_size=4, positions=128)


@pytest.mark.parametrize("training", [True, False])
def test_the_lists_of_blocks_are_the_plan(training):
    """Kernels read these lists; torch's reference for a CPU does not."""
    lengths = (61, 20, 100)
    mask = torch.stack([torch.arange(104) < n for n in lengths])
    for seed in SHAPE.seeds:
        plan = Plans(mask, lengths, SHAPE).of(seed, training).mask
        heads = SHAPE.heads if training else 1
        assert plan.kv_num_blocks.shape == (3, heads, 26)
        for row, length in enumerate(lengths):
            blocks = -(-length // 4)
            for head in range(heads):
                for query in range(26):
                    wholly, partly = listed(plan, row, head, query, ("full_kv", "kv"))
                    expected = set()
                    if query < blocks:
                        expected = {0, blocks - 1, query - 1, query, query + 1} & set(range(blocks))
                        if query in (0, blocks - 1) or blocks < shortest_sparse(2):
                            expected = set(range(blocks))
                        elif training:
                            expected |= set(random_blocks(blocks, SHAPE, seed)[head, query - 1].tolist())
                    assert wholly == expected - {blocks - 1}
                    assert partly == expected & {blocks - 1}
        assert_transposed(plan, heads)


def listed(plan, row, head, block, kinds):
    found = []
    for kind in kinds:
        number = int(getattr(plan, f"{kind}_num_blocks")[row, head, block])
        found.append(set(getattr(plan, f"{kind}_indices")[row, head, block, :number].tolist()))
    return found


def assert_transposed(plan, heads):
    for forward, backward in (("kv", "q"), ("full_kv", "full_q")):
        for row in range(3):
            for head in range(heads):
                seen = {(q, k) for q in range(26) for k in listed(plan, row, head, q, (forward,))[0]}
                assert seen == {(q, k) for k in range(26) for q in listed(plan, row, head, k, (backward,))[0]}


@pytest.mark.slow
def test_a_compiled_kernel_gives_the_same():
    # torch has one for a CPU, forward only and for known shapes; it reads the lists as a GPU's does.
    from samerun.kernels.bigbird.attention import BlockSparse
    from samerun.kernels.bigbird.flex import LENGTHS, SHAPE
    from samerun.kernels.bigbird.rows import read_rows

    x = torch.randn(3, 3, 832, SHAPE.heads, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.stack([torch.arange(832) < n for n in LENGTHS])
    with row_lengths(LENGTHS), torch.no_grad():
        rows = read_rows(mask, SHAPE)
        plan = Plans(mask, LENGTHS, SHAPE).of(0, False)
        q, k, v = (y.transpose(1, 2) for y in x)
        kernel = torch.compile(torchs.flex_attention, dynamic=False)
        found = (
            kernel(q, k, v, score_mod=plan.bias, block_mask=plan.mask).transpose(1, 2) * mask[..., None, None]
        )
        expected = BlockSparse.apply(*x, rows, [None] * len(rows.groups))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_it_is_tried_out_before_it_is_used(reference, monkeypatch):
    assert samerun.kernels.bigbird.flex._sees_twice(16, samerun.kernels.bigbird.flex.SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert samerun.kernels.bigbird.flex.is_usable(CPU, torch.float32, 16)

    monkeypatch.setattr(samerun.kernels.bigbird.flex, "CASES", samerun.kernels.bigbird.flex.CASES[:1])

    def fails(*_):
        raise RuntimeError("no kernel for this chip")

    monkeypatch.setattr(samerun.kernels.bigbird.flex, "attend", fails)
    with pytest.warns(
        UserWarning, match="not used for BigBird .* heads of 24.*: RuntimeError: no kernel for this chip"
    ):
        assert not samerun.kernels.bigbird.flex.is_usable(CPU, torch.float32, 24)
    monkeypatch.setattr(samerun.kernels.bigbird.flex, "attend", lambda q, *others: attend(1.2 * q, *others))
    with pytest.warns(UserWarning, match="differs by .* of the largest element"):
        assert not samerun.kernels.bigbird.flex.is_usable(CPU, torch.float32, 32)


def test_tiles_divide_a_block():
    class Config(SimpleNamespace):
        pass

    wide = Config(block_m1=64, block_n1=128, block_m2=128, block_n2=64, num_stages=3, num_warps=8)
    narrow = Config(block_m1=16, block_n1=32, block_m2=16, block_n2=16, num_stages=1, num_warps=8)
    square = Config(block_m1=64, block_n1=64, block_m2=64, block_n2=64, num_stages=3, num_warps=4)
    assert shrink([wide, narrow, square], 64) == [square, narrow]


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchs_own_choices_for_hopper_have_tiles_that_divide_a_block(size, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    choices, plain = SmallTiles(64), InductorChoices()
    assert (
        size != 64
        or dtype != torch.bfloat16
        or plain.get_flex_attention_bwd_configs(size, dtype)[0].block_n1 == 128
    )
    for found in (
        choices.get_flex_attention_fwd_configs(size, dtype),
        choices.get_flex_attention_bwd_configs(size, dtype),
    ):
        assert found
        for config in found:
            assert all(64 % value == 0 for name, value in vars(config).items() if name.startswith("block_"))
