"""Limits torch's tile sizes for FlexAttention to the block size.

By default, torch 2.11 and 2.13 choose tiles of 128 for the backward pass on Hopper and then fail because they
do not divide a block.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor import config as inductor
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V


class SmallTiles(InductorChoices):
    """torch's configurations with tiles of at most `limit`."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def uuid(self) -> str:  # part of the key of torch's compile cache
        return f"tiles of at most {self.limit}"

    def get_flex_attention_fwd_configs(self, *of: Any, **named: Any) -> list[Any]:
        return shrink(super().get_flex_attention_fwd_configs(*of, **named), self.limit)

    def get_flex_attention_bwd_configs(self, *of: Any, **named: Any) -> list[Any]:
        return shrink(super().get_flex_attention_bwd_configs(*of, **named), self.limit)


def limit_tiles(limit: int) -> None:
    """Limits tiles in this process, unless `inductor_choices_class` was configured."""
    if inductor.inductor_choices_class is None:
        inductor.inductor_choices_class = functools.partial(SmallTiles, limit)  # called once per thread
        V.set_choices_handler(SmallTiles(limit))


def shrink(configs: list[Any], limit: int) -> list[Any]:
    """Reduces tiles to `limit` and uses four warps for reduced ones; drops duplicates."""
    shrunk = []
    for config in configs:
        sides = [name for name in vars(config) if name.startswith("block_")]
        if any(getattr(config, side) > limit for side in sides):
            changed = {side: min(limit, getattr(config, side)) for side in sides}
            config = type(config)(**{**vars(config), **changed, "num_warps": 4})
        if config not in shrunk:
            shrunk.append(config)
    return shrunk
