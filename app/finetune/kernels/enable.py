"""TEMPORARY: replaced by the kernels' own entry."""

from finetune.kernels.bigbird.layers import use_fast_attention
from finetune.kernels.dropout.attention import use_fast_dropout
from finetune.kernels.masks import spare_the_device
from finetune.kernels.padding_free.choice import packs_rows
from finetune.kernels.padding_free.encoders import pack_rows


def check_padding_free(arguments, config, on_gpu, padding_side):
    return packs_rows(arguments.padding_free, config, on_gpu, padding_side)


def enable_masks(kernels, use_cpu):
    import torch

    spare_the_device(torch.device("cpu" if use_cpu else "cuda"))


def enable_kernels(model, *, kernels, attention, padding_free):
    use_fast_attention(model, attention)
    use_fast_dropout(model)
    if padding_free:
        pack_rows(model)
