"""Encoder-decoder models for title generation.

A checkpoint with a decoder is used as it is. An encoder, such as BigBird, gets a BERT decoder with
cross-attention, whose layers are initialized from the encoder's. The decoder may be shallow: it runs once per
generated token, the encoder once per document.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    EncoderDecoderModel,
)

from samerun.errors import InputError
from samerun.models import pretrained

TAKEN_FROM_ENCODER = ("intermediate_size", "hidden_dropout_prob", "attention_probs_dropout_prob")


def load_title_config(arguments: Any) -> Any:
    """The configuration of the model. Raises `InputError` for a model that cannot write titles."""
    config = pretrained.load_config(arguments)
    name = arguments.config_name or arguments.model_name_or_path
    if config.is_encoder_decoder:
        decoder = getattr(config, "decoder", None)
        if getattr(decoder, "model_type", None) == "big_bird":
            raise InputError(
                f"{name}: its decoder is a BigBird, whose self-attention gets the encoder's states in "
                "transformers, so it sees no earlier token of the title; use a BERT decoder instead (give "
                "the encoder alone, with --decoder_layers N)"
            )
        return config
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise InputError(
            f"{name}: {config.model_type} has a decoder only; titles need an encoder-decoder model (BART, "
            "mT5, LED, PEGASUS, ...) or an encoder (BigBird, BERT)"
        )
    if not hasattr(config, "vocab_size"):
        raise InputError(f"{name}: the model ({config.model_type}) cannot read texts; name another")
    return config


def check_decoder(arguments: Any, config: Any) -> None:
    """Raises `InputError` if --max_title_length is too long for a trained decoder, or weights are missing."""
    pretrained.check_weights(arguments)
    name, requested = arguments.decoder_model_name_or_path, arguments.max_title_length
    if not config.is_encoder_decoder:
        if arguments.export == "adapter":
            raise InputError("--export adapter: the base model would have no decoder; leave it out")
        if not name:
            return
        named = replace(arguments, model_name_or_path=name, config_name=None, from_scratch=False)
        config = pretrained.load_config(named)
        pretrained.check_weights(named)
    decoder = getattr(config, "decoder", None) or config
    limit = getattr(decoder, "max_decoder_position_embeddings", None)
    limit = limit or getattr(decoder, "max_position_embeddings", None)
    if limit is not None and requested + 2 > limit:  # with start and end token
        raise InputError(
            f"--max_title_length {requested} is more than the decoder can write; give at most {limit - 2}"
        )


def special_ids(config: Any, tokenizer: Any) -> tuple[int, int]:
    """(start id, end id) of titles. A new decoder behind an encoder: cls and sep if the tokenizer puts them
    around texts (BigBird's also has bos and eos). Else start: the checkpoint's own, or the tokenizer's bos or
    cls; end: eos or sep. Raises `InputError` if the tokenizer lacks these tokens."""
    start = getattr(config, "decoder_start_token_id", None)
    around = [tokenizer.cls_token_id, tokenizer.sep_token_id]
    is_joined = not config.is_encoder_decoder or config.model_type == "encoder-decoder"
    may_wrap = is_joined and None not in around and start in (None, around[0])
    if may_wrap and tokenizer("")["input_ids"] == around:
        return tuple(around)
    if start is None:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if start is None or end is None:
        raise InputError(
            "the tokenizer has neither bos and eos nor cls and sep tokens, one pair of which titles need; "
            "add them to its tokenizer_config.json"
        )
    return start, end


def has_global_attention(config: Any) -> bool:
    """Whether the model's first token attends to all others and they to it, as LED's in its pretraining."""
    return config.model_type == "led"


def global_attention(config: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`global_attention_mask`, (b, width), of the first token, if the model has it; else {}."""
    if not has_global_attention(config):
        return {}
    mask = torch.zeros_like(inputs["input_ids"])
    mask[:, 0] = 1
    return {"global_attention_mask": mask}


def build_title_model(arguments: Any, config: Any, tokenizer: Any) -> Any:
    """The model in fp32, with start, padding and end ids in its configurations. The caller seeds torch.
    Raises `InputError` if weights cannot be loaded or the tokenizer lacks a special token."""
    if not config.is_encoder_decoder:
        model = _encoder_with_decoder(arguments, config, tokenizer)
    elif arguments.from_scratch and config.model_type == "encoder-decoder":
        config.decoder.is_decoder = config.decoder.add_cross_attention = True
        parts = AutoModel.from_config(config.encoder), AutoModelForCausalLM.from_config(config.decoder)
        model = EncoderDecoderModel(encoder=parts[0].float(), decoder=parts[1].float())
    else:
        model = pretrained.load_model(AutoModelForSeq2SeqLM, arguments, config)
    start, end = special_ids(model.config, tokenizer)  # a checkpoint's own start id is kept
    for holder in (model.config, model.generation_config):
        holder.decoder_start_token_id, holder.eos_token_id = start, end
        holder.pad_token_id = tokenizer.pad_token_id
    return model


def new_names(model: Any, arguments: Any, config: Any) -> set[str]:
    """The parameters without pretrained values: a new decoder's, or a pretrained one's cross-attention."""
    names = [name for name, _ in model.named_parameters()]
    if arguments.from_scratch:
        return set(names)
    if config.is_encoder_decoder:
        return set()
    new = "crossattention." if arguments.decoder_model_name_or_path else ""
    return {name for name in names if not name.startswith("encoder.") and new in name}


def set_output_bias(model: Any, title_ids: np.ndarray) -> None:
    """Sets the output bias of a new decoder, if it has one, to the log-frequencies of title tokens.

    `title_ids`: the ids of all training titles in one array. Half an occurrence is added to each token. As
    for a new classifier's head, this saves the first steps, which would learn the frequencies.
    """
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        counts = np.bincount(title_ids, minlength=len(bias)) + 0.5
        with torch.no_grad():
            bias.copy_(torch.as_tensor(np.log(counts / counts.sum())))


def set_decoder_start(config: Any, start: dict[str, int]) -> None:
    """Sets the decoder's start token to the title language. `start`: settings of `set_languages` in
    text/tokenizer.py."""
    if "decoder_start_token_id" in start:
        config.decoder_start_token_id = start["decoder_start_token_id"]


def store_settings(model: Any, start: dict[str, int], **settings: str) -> None:
    """Stores the language tokens `start` and `settings` that are not empty in the configurations that are
    exported."""
    set_decoder_start(model.config, start)
    for name, token_id in start.items():
        setattr(model.generation_config, name, token_id)
    model.config.update({name: value for name, value in settings.items() if value})


def _encoder_with_decoder(arguments: Any, config: Any, tokenizer: Any) -> Any:
    if arguments.from_scratch:
        pretrained.take_vocabulary(config, tokenizer)
    config.pad_token_id = tokenizer.pad_token_id
    encoder = pretrained.load_model(AutoModel, arguments, config)
    if arguments.decoder_model_name_or_path:
        decoder = _load_decoder(arguments)
        pretrained.check_vocabulary(decoder, tokenizer, "decoder")
    else:
        decoder = AutoModelForCausalLM.from_config(_decoder_config(arguments, config, tokenizer))
        if arguments.from_scratch:
            # Titles repeat words of their documents, so encoder and decoder start with the same embeddings.
            decoder.get_input_embeddings().load_state_dict(encoder.get_input_embeddings().state_dict())
        else:
            _warm_start(decoder, encoder)
    return EncoderDecoderModel(encoder=encoder, decoder=decoder.float())


def _load_decoder(arguments: Any) -> Any:
    name = arguments.decoder_model_name_or_path
    kind = {"is_decoder": True, "add_cross_attention": True, **arguments.hub_options(name)}
    try:
        if pretrained.on_meta():
            decoder = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name, **kind)).float()
            loading = {"unexpected_keys": []}
        else:
            kind |= {"dtype": torch.float32, "output_loading_info": True}
            decoder, loading = AutoModelForCausalLM.from_pretrained(name, **kind)
    except Exception as error:
        raise InputError(pretrained.explain_failed_load("decoder", name, error)) from error
    pretrained.check_all_layers_used(name, decoder, loading)
    if decoder.config.model_type == "big_bird":
        raise InputError(
            f"--decoder_model_name_or_path {name}: a BigBird cannot be a decoder in transformers; use a BERT"
        )
    return decoder


def _decoder_config(arguments: Any, encoder: Any, tokenizer: Any) -> Any:
    # BERT's defaults stand in for what other encoders lack or name differently: ModernBERT, DistilBERT.
    sizes = {"intermediate_size": 4 * encoder.hidden_size}
    sizes |= {name: getattr(encoder, name) for name in TAKEN_FROM_ENCODER if hasattr(encoder, name)}
    return BertConfig(
        **sizes,
        vocab_size=max(encoder.vocab_size, len(tokenizer)),
        hidden_size=encoder.hidden_size,
        num_hidden_layers=arguments.decoder_layers or encoder.num_hidden_layers,
        num_attention_heads=encoder.num_attention_heads,
        max_position_embeddings=max(128, arguments.max_title_length + 2),
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
        is_decoder=True,
        add_cross_attention=True,
    )


def _warm_start(decoder: Any, encoder: Any) -> None:
    """Initializes the decoder from the encoder: embeddings, and evenly spaced layers from the first to the
    last. Cross-attention has no counterpart and keeps its random weights."""
    sources, targets = encoder.state_dict(), decoder.bert.state_dict()
    last_source, last_target = encoder.config.num_hidden_layers - 1, decoder.config.num_hidden_layers - 1
    with torch.no_grad():
        for name, target in targets.items():
            parts = name.split(".")
            if parts[:2] == ["encoder", "layer"]:
                parts[2] = str(round(int(parts[2]) * last_source / max(1, last_target)))
            source = sources.get(".".join(parts))
            # The encoder's tables of positions and token types may have more rows; the first rows are copied.
            if source is not None and source.shape[1:] == target.shape[1:]:
                rows = min(len(source), len(target))
                target[:rows] = source[:rows]
