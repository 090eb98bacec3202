import numpy as np
import pytest
import torch
from transformers import BertConfig, BigBirdConfig, BigBirdPegasusConfig, EncoderDecoderConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import BigBirdPegasusBlockSparseAttention

from samerun.errors import InputError
from samerun.kernels.bigbird import Shape, choose_attention, padding_of, random_blocks, shortest_sparse


def config(**changes):
    return BigBirdConfig(block_size=16, num_random_blocks=2, max_position_embeddings=512, **changes)


def transformers_plan(attention, blocks):
    """What transformers hands to its gathering of random keys, caught on its way there."""
    caught = []

    def catch(from_mask, to_mask, plan, *_):
        caught.append(plan)
        raise StopIteration

    attention._create_rand_mask_from_inputs = catch
    size = attention.block_size
    hidden = torch.zeros(1, blocks * size, attention.all_head_size)
    mask = torch.ones(1, blocks, size)
    with pytest.raises(StopIteration):
        attention(hidden, from_blocked_mask=mask, to_blocked_mask=mask)
    return caught[0][0].numpy()


KINDS = {
    BigBirdBlockSparseAttention: BigBirdConfig(hidden_size=2, num_attention_heads=2),
    BigBirdPegasusBlockSparseAttention: BigBirdPegasusConfig(d_model=2, encoder_attention_heads=2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("number", "block_size", "positions", "lengths"),
    [
        (3, 64, 4096, (768, 832, 1024, 1088, 1536, 2048, 3072, 3136, 4032, 4096)),
        (3, 64, 1024, (768, 960, 1024)),
        (2, 16, 1040, (160, 176, 992, 1008, 1024, 1040)),
        (1, 8, 130, (64, 72, 120, 128)),
    ],
)
def test_random_blocks_are_those_of_transformers(kind, number, block_size, positions, lengths):
    given = {"max_position_embeddings": positions, "block_size": block_size, "num_random_blocks": number}
    KINDS[kind].update(given)
    for seed in (0, 3):
        attention = kind(KINDS[kind], seed).train()
        for length in lengths:
            blocks = length // block_size
            assert blocks >= shortest_sparse(number)
            ours = random_blocks(blocks, Shape(2, number, block_size, positions), seed, torch.device("cpu"))
            theirs = transformers_plan(attention, blocks)
            np.testing.assert_array_equal(ours, theirs, err_msg=f"length {length}")


@pytest.mark.parametrize(
    ("given", "length", "told", "chosen", "padding"),
    [
        ({}, 144, "full attention", "original_full", 1),
        ({}, 145, None, "block_sparse", 16),
        ({"attention_type": "original_full"}, 512, "original_full", "block_sparse", 16),
    ],
)
def test_the_attention_follows_the_length(given, length, told, chosen, padding):
    made = config(**given)
    found = choose_attention(made, length)
    assert found is None if told is None else told in found
    assert (made.attention_type, padding_of(made)) == (chosen, padding)


def test_padding_to_the_block_must_fit_the_position_table():
    tight = BigBirdConfig(block_size=16, num_random_blocks=2, max_position_embeddings=500)
    assert choose_attention(tight, 496) is None
    message = r"--max_length 497 needs 512 positions in blocks of 16, .* 500; give at most 496"
    with pytest.raises(InputError, match=message):
        choose_attention(tight, 497)


def test_the_encoder_of_a_pair_is_what_counts():
    pair = EncoderDecoderConfig.from_encoder_decoder_configs(config(), BertConfig())
    assert choose_attention(pair, 100) is not None
    assert pair.encoder.attention_type == "original_full"
    assert choose_attention(pair, 300) is not None
    assert padding_of(pair) == 16
    pegasus = BigBirdPegasusConfig(block_size=16, num_random_blocks=2, max_position_embeddings=512)
    assert padding_of(pegasus) == 16


@pytest.mark.parametrize("other", [BertConfig(), config(is_decoder=True)])
def test_other_models_are_left_alone(other):
    before = other.to_dict()
    assert choose_attention(other, 10_000) is None
    assert padding_of(other) == 1
    assert other.to_dict() == before
