"""Languages of multilingual encoder-decoders, such as mBART and NLLB: tokens for the language of a text and of its title."""

from __future__ import annotations

import re
from typing import Any

from finetune.errors import InputError
from finetune.reading.problems import listed, nearest

CODE = re.compile(r"[a-z]{2,3}_[A-Za-z]{2,4}")  # zh_CN of mBART, zho_Hans of NLLB


def set_languages(tokenizer: Any, arguments: Any) -> dict[str, int]:
    """Tells a tokenizer --source_lang and --target_lang, which it is saved with, and returns what a model must be told so that
    its titles are in the target language: the token that the decoder starts with (mBART), or the first one that it writes
    (mBART-50, NLLB). {} where no language is given.

    Raises `InputError` for a tokenizer without languages, and for codes that it does not have.
    """
    source, target = arguments.source_lang, arguments.target_lang or arguments.source_lang
    if source is None:
        return {}
    name = arguments.tokenizer_name or arguments.model_name_or_path
    codes = sorted({str(token) for token in tokenizer.added_tokens_decoder.values() if CODE.fullmatch(str(token))})
    if not hasattr(tokenizer, "src_lang") or not codes:
        raise InputError(f"--source_lang {source}: the tokenizer of {name} has no language codes; leave it out")
    given = {"source_lang": source, "target_lang": target}
    wrong = [argument for argument, code in given.items() if code not in codes]
    if wrong:
        raise InputError(*(_unknown(argument, given[argument], codes, name) for argument in wrong))
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    code = tokenizer.convert_tokens_to_ids(target)
    first = tokenizer(text_target="")["input_ids"][0]
    return {"forced_bos_token_id" if first == code else "decoder_start_token_id": code}


def _unknown(argument: str, code: str, codes: list[str], name: str) -> str:
    near = nearest(code, codes)
    return (
        f"--{argument} {code}: {name} has no such language{f'; did you mean {near}?' if near else '.'} It has {listed(codes)}"
    )
