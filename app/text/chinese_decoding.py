"""Decoded Chinese without the spaces that a WordPiece tokenizer puts between its tokens."""

import re

HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
KANA = "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"
MARKS = (  # Chinese punctuation: 、。《》【】 and the full-width and vertical forms of ASCII's
    "\u3001-\u3004\u3008-\u3020\u3030-\u303f\ufe10-\ufe1f\ufe30-\ufe6f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)
FULL_WIDTH = "\u3005-\u3007\u3021-\u302f\uff10-\uff19\uff21-\uff3a\uff41-\uff5a"  # 々〇〡, ０Ａａ
WIDE = HAN + KANA + MARKS + FULL_WIDTH
SHARED = "“”‘’—…·"  # written in English too, where the spaces around them may be meant
ADDED_SPACE = re.compile(
    f"(?<=[{WIDE}{SHARED}]) +(?=[{WIDE}])|(?<=[{WIDE}]) +(?=[{SHARED}])"  # between wide characters
    f"|(?<=[{MARKS}]) +| +(?=[{MARKS}])"  # on both sides of Chinese punctuation, whatever the neighbour
    rf"|(?<=[{WIDE}]) +(?=[,.:;!?%)\]}}])|(?<=[(\[{{]) +(?=[{WIDE}])"  # ASCII marks that lean on a wide character
    "|(?<=“) +| +(?=”)"
)


def join_chinese(text: str) -> str:
    """`text` without the spaces that stand between Chinese (or Japanese) characters or beside their punctuation.

    BERT's tokenizer makes a word of every Chinese character and decodes with a space between words: 深 度 学 习 。
    Removed: spaces between two wide characters, on both sides of Chinese punctuation and full-width forms, inside “ ”,
    and between a wide character and the ASCII punctuation that leans on it. Kept: spaces between Latin words or
    numbers, and those between a Latin word or number and a Chinese character (使用 BERT 模型, 2023 年): whether the
    author wrote them is not in the tokens, and the words stay apart. Line breaks are kept. Applying it twice changes
    nothing more.
    """
    return ADDED_SPACE.sub("", text).strip(" ")
