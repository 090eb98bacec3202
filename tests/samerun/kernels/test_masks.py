"""Masks made without a look at them mean what transformers' own mean."""

import pytest
import torch
from transformers import (
    AttentionMaskInterface,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
)

from samerun.kernels.masks import mask_without_sync, use_masks_without_sync
from samerun.kernels.row_lengths import row_lengths

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 40,
}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}


class Watched(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises where a value is asked of a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def models():
    torch.manual_seed(0)
    yield BertModel(BertConfig(**SIZES, **CALM))
    yield BertLMHeadModel(BertConfig(**SIZES, **CALM, is_decoder=True))
    yield ModernBertModel(
        ModernBertConfig(**SIZES, pad_token_id=0, local_attention=4, global_attn_every_n_layers=2)
    )


@pytest.mark.parametrize("rows", [(9, 4), (9, 9)])
def test_the_same_states_and_nothing_asked(rows, monkeypatch):
    ids = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([torch.arange(9) < n for n in rows]).long()
    for model in models():
        model.eval()
        expected = model(input_ids=ids, attention_mask=mask)[0]
        with monkeypatch.context() as patch:
            patch.setitem(AttentionMaskInterface._global_mapping, "sdpa", mask_without_sync)
            for lengths in (None, rows):
                with row_lengths(lengths), Watched(), torch.no_grad():
                    found = model(input_ids=ids, attention_mask=mask)[0]
                torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)


def test_a_mask_is_left_out_where_the_host_knows_that_nothing_is_padded():
    sizes = {
        "batch_size": 2,
        "q_length": 5,
        "kv_length": 5,
        "allow_is_bidirectional_skip": True,
        "allow_is_causal_skip": False,
    }
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert mask_without_sync(**sizes, attention_mask=mask) is not None
    with row_lengths((5, 5)):
        assert mask_without_sync(**sizes, attention_mask=mask) is None
    with row_lengths((5, 4)):
        assert mask_without_sync(**sizes, attention_mask=mask) is not None
    assert mask_without_sync(**sizes) is None


def test_on_a_cpu_transformers_may_look():
    before = AttentionMaskInterface()["sdpa"]
    use_masks_without_sync(torch.device("cpu"))
    assert AttentionMaskInterface()["sdpa"] is before
