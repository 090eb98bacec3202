"""Removes the spaces that a WordPiece tokenizer puts between Chinese tokens when it decodes."""

import re

CJK = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
    "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3005-\u3007\u3021-\u302f\uff10-\uff19\uff21-\uff3a\uff41-\uff5a"  # 々〇〡, full-width ０Ａａ
)
PUNCTUATION = (  # 、。《》【】 and the full-width and vertical forms of ASCII's
    "\u3001-\u3004\u3008-\u3020\u3030-\u303f\ufe10-\ufe1f\ufe30-\ufe6f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)
WIDE = CJK + PUNCTUATION
SHARED = "“”‘’—…·"  # English uses them too, where spaces around them may be meant
ADDED_SPACE = re.compile(
    f"(?<=[{WIDE}{SHARED}]) +(?=[{WIDE}])|(?<=[{WIDE}]) +(?=[{SHARED}])"
    f"|(?<=[{PUNCTUATION}]) +| +(?=[{PUNCTUATION}])"
    rf"|(?<=[{WIDE}]) +(?=[,.:;!?%)\]}}])|(?<=[(\[{{]) +(?=[{WIDE}])"
    "|(?<=“) +| +(?=”)"
)


def join_chinese(text: str) -> str:
    """`text` without the spaces between Chinese (or Japanese) characters and beside their punctuation.

    Removed: 深 度 学 习 。 -> 深度学习。, also inside “ ” and beside ASCII punctuation that touches a Chinese character.
    Kept: spaces between Latin words or numbers, and between one of them and a Chinese character (使用 BERT 模型): the tokens
    do not tell whether the author wrote these. Idempotent.
    """
    return ADDED_SPACE.sub("", text).strip(" ")
