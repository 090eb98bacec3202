import numpy as np
import pytest
from transformers import BertConfig, BigBirdConfig, BigBirdPegasusConfig, EncoderDecoderConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import BigBirdPegasusBlockSparseAttention

from samerun.errors import InputError
from samerun.kernels.bigbird import Shape, choose_attention, padding_of, random_blocks, shortest_sparse


def config(**changes):
    return BigBirdConfig(block_size=16, num_random_blocks=2, max_position_embeddings=512, **changes)


def layer(source, heads, number, block_size, positions, seed):
    changes = {"max_position_embeddings": positions, "block_size": block_size, "num_random_blocks": number}
    if source is BigBirdBlockSparseAttention:
        return source(BigBirdConfig(hidden_size=heads, num_attention_heads=heads, **changes), seed)
    return source(BigBirdPegasusConfig(d_model=heads, encoder_attention_heads=heads, **changes), seed)


def transformers_plan(attention, blocks):
    """What transformers hands to its gathering of random keys, caught on its way there."""
    import torch

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


@pytest.mark.parametrize("source", [BigBirdBlockSparseAttention, BigBirdPegasusBlockSparseAttention])
@pytest.mark.parametrize(
    ("number", "block_size", "positions", "lengths"),
    [
        (3, 64, 4096, (768, 832, 1024, 1088, 1536, 2048, 3072, 3136, 4032, 4096)),
        (3, 64, 1024, (768, 960, 1024)),
        (2, 16, 1040, (160, 176, 992, 1008, 1024, 1040)),
        (1, 8, 130, (64, 72, 120, 128)),
    ],
)
def test_random_blocks_are_those_of_transformers_at_every_length(
    source, number, block_size, positions, lengths
):
    for seed in (0, 3):
        attention = layer(source, 2, number, block_size, positions, seed).train()
        for length in lengths:
            blocks = length // block_size
            assert blocks >= shortest_sparse(number)
            ours = random_blocks(blocks, Shape((seed,), 2, number, block_size, positions), seed)
            np.testing.assert_array_equal(
                ours, transformers_plan(attention, blocks), err_msg=f"length {length}"
            )


def test_layers_and_heads_have_plans_of_their_own():
    first, second = (random_blocks(20, Shape((0, 1), 2, 3, 64, 4096), seed) for seed in (0, 1))
    assert (first != second).any()
    assert (first[0] != first[1]).any()


def test_a_layer_is_planned_once_for_all_lengths(monkeypatch):
    shape = Shape((77,), 1, 3, 64, 2048)
    longer = random_blocks(20, shape, 77)
    monkeypatch.setattr(np.random, "seed", None)
    np.testing.assert_array_equal(random_blocks(19, shape, 77), longer[:, :-1])


def test_a_row_beyond_the_position_table_is_refused():
    with pytest.raises(ValueError, match="9 blocks of 16 tokens pass the 128 positions"):
        random_blocks(9, Shape((0,), 1, 1, 16, 128), 0)


def test_short_runs_use_full_attention_and_say_so():
    short = config()
    assert "full attention" in choose_attention(short, 144)
    assert short.attention_type == "original_full"
    assert padding_of(short) == 1


def test_long_runs_are_block_sparse_and_padded_to_whole_blocks():
    long = config()
    assert choose_attention(long, 145) is None
    assert long.attention_type == "block_sparse"
    assert padding_of(long) == 16


def test_a_full_attention_configuration_is_switched_for_long_runs_and_the_reader_told():
    long = config(attention_type="original_full")
    assert padding_of(long) == 1
    assert "original_full" in choose_attention(long, 512)
    assert long.attention_type == "block_sparse"
    assert padding_of(long) == 16


def test_padding_to_the_block_must_fit_the_position_table():
    tight = BigBirdConfig(block_size=16, num_random_blocks=2, max_position_embeddings=500)
    assert choose_attention(tight, 496) is None
    with pytest.raises(
        InputError, match=r"--max_length 497 needs 512 positions in blocks of 16, .* 500; give at most 496"
    ):
        choose_attention(tight, 497)


def test_full_attention_is_not_padded_and_may_fill_the_table():
    assert "full attention" in choose_attention(
        BigBirdConfig(block_size=64, max_position_embeddings=700), 700
    )


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
