"""Loops of dropout by row on a CPU, compiled by numba: random bits, and all of attention that is no matrix
product, in a few passes over the weights instead of a dozen.

Arrays are float32, for `drop` also float64; bf16, which numpy lacks, is the uint16 of its bits and computed
in float32. Functions are compiled at their first call, for some seconds, and kept beside Python's compiled
files for later runs. They release Python's lock.
"""

from collections.abc import Callable

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor

from samerun.kernels.common import memory_of

INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64's counter
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # factors of its mixing function
# 2**x for 0 <= x <= 1: a polynomial's factors from the highest power, with a relative error of 2e-7.
POWER_OF_2 = Chebyshev.interpolate(np.exp2, 5, [0, 1]).convert(kind=Polynomial).coef[::-1].astype(np.float32)
LN2 = np.float32(np.log(2))
# Sums may be reordered, as torch's are. Hence a loop that adds up must not write: LLVM would choose the order
# by the distance of its arrays in memory. Infinity and NaN keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}


def compiled(function: Callable) -> Callable:
    options = {"nogil": True, "fastmath": FAST, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder can be written
        return njit(**options)(function)


def array(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor on the CPU, as these functions take it."""
    if tensor.dtype == torch.bfloat16:
        return memory_of(tensor.view(torch.int16)).view(np.uint16)
    return memory_of(tensor)


@intrinsic
def _float_of(context, bits):
    """The float32 that has these bits (int32)."""
    return types.float32(types.int32), lambda c, builder, s, a: builder.bitcast(a[0], ir.FloatType())


@intrinsic
def _bits_of(context, number):
    """The bits (int32) of a float32."""
    return types.int32(types.float32), lambda c, builder, s, a: builder.bitcast(a[0], ir.IntType(32))


@intrinsic
def _higher(context, a, b):
    """The higher of two float32, NaN if one is NaN: unlike Python's max it is one instruction of LLVM's."""

    def generate(context, builder, signature, arguments):
        number = ir.FloatType()
        of_two = ir.FunctionType(number, [number, number])
        maximum = builder.module.declare_intrinsic("llvm.maximum", [number], of_two)
        return builder.call(maximum, arguments)

    return types.float32(types.float32, types.float32), generate


def _load(number):
    """A number of an array, in the precision of computation."""


def _rounded(number, like):
    """A computed number for an array that has numbers as `like`."""


@overload(_load)
def _compile_load(number):
    if number == types.uint16:
        return lambda number: _float_of(np.int32(np.uint32(number) << np.uint32(16)))
    return lambda number: number


@overload(_rounded)
def _compile_rounded(number, like):
    def to_bf16(number, like):
        bits = np.uint32(_bits_of(np.float32(number)))
        # To the nearest, of two equally near ones to the even one.
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    return to_bf16 if like == types.uint16 else lambda number, like: number


@njit(inline="always")
def _mixed(word):
    """SplitMix64's mixing function."""
    word = (word ^ (word >> np.uint64(30))) * FIRST
    word = (word ^ (word >> np.uint64(27))) * SECOND
    return word ^ (word >> np.uint64(31))


@njit(inline="always")
def _draw(words, key):
    """Fills `words` (uint64) with the random bits of a line."""
    for place in range(len(words)):
        words[place] = _mixed(key + np.uint64(place) * INCREMENT)


@njit(inline="always")
def _power_of_2(x):
    """2**x of a float32 up to 0; 0 below -127."""
    x = np.float32(-127) if x < np.float32(-127) else x
    whole = np.floor(x)
    part = x - whole
    power = POWER_OF_2[0]
    for factor in POWER_OF_2[1:]:
        power = power * part + factor
    return power * _float_of((np.int32(whole) + np.int32(127)) << np.int32(23))


@compiled
def drop(x, out, keys, dropped, scale):
    """Dropout of lines: `x`, `out` (lines, elements); `keys` (lines,) uint64. An element whose random int16
    is below `dropped` becomes 0, any other is multiplied by `scale`."""
    words = np.empty((x.shape[1] + 3) // 4, np.uint64)
    levels, nothing = words.view(np.int16), scale * np.float32(0)
    for line in range(len(x)):
        source, target = x[line], out[line]
        _draw(words, keys[line])
        for place in range(len(source)):
            number = _load(source[place]) * scale
            target[place] = _rounded(number if levels[place] >= dropped else nothing, target[place])


@compiled
def weigh(scores, bias, lines, scale, keys, stride, dropped, factor, logarithms):
    """Turns scores of attention (rows, heads, queries, keys) into weights with dropout, in place.

    `bias` (n, keys) float32 is added to the scaled scores, its line `lines[row, head, query]` to those of a
    query. `keys` (rows, heads) uint64: dropout's, of the first query; `stride`: from query to query;
    `dropped` and `factor`: as `dropped` and `scale` of `drop`. Fills `logarithms` (rows, heads, queries) with
    the binary logarithms of the softmax's denominators.
    """
    rows, heads, queries, width = scores.shape
    words, weights = np.empty((width + 3) // 4, np.uint64), np.empty(width, np.float32)
    levels = words.view(np.int16)
    for row in range(rows):
        for head in range(heads):
            for query in range(queries):
                line, added = scores[row, head, query], bias[lines[row, head, query]]
                highest = np.float32(-3e38)
                for place in range(width):
                    highest = _higher(highest, _load(line[place]) * scale + added[place])
                _draw(words, keys[row, head] + np.uint64(query) * stride)
                for place in range(width):
                    weights[place] = _power_of_2(_load(line[place]) * scale + added[place] - highest)
                total = np.float32(0)
                for place in range(width):
                    total += weights[place]
                total = _higher(total, np.float32(1e-37))
                share = factor / total
                for place in range(width):
                    kept = weights[place] * (share if levels[place] >= dropped else np.float32(0))
                    line[place] = _rounded(kept, line[place])
                logarithms[row, head, query] = highest + np.log2(total)


@compiled
def differentiate(scores, gradients, delta, bias, lines, scale, keys, stride, dropped, factor, logarithms):
    """Turns scores into weights as `weigh` does, and the gradients of the weights into those of the scores
    before `scale`, both in place. `delta` (rows, heads, queries): the sum over the keys of weight times
    gradient."""
    rows, heads, queries, width = scores.shape
    words = np.empty((width + 3) // 4, np.uint64)
    levels, slope_scale = words.view(np.int16), scale * LN2
    for row in range(rows):
        for head in range(heads):
            for query in range(queries):
                line, slope = scores[row, head, query], gradients[row, head, query]
                added, logarithm = bias[lines[row, head, query]], logarithms[row, head, query]
                subtracted = delta[row, head, query]
                _draw(words, keys[row, head] + np.uint64(query) * stride)
                for place in range(width):
                    weight = _power_of_2(_load(line[place]) * scale + added[place] - logarithm)
                    kept = weight * factor if levels[place] >= dropped else np.float32(0)
                    gradient = _load(slope[place]) * kept - subtracted * weight
                    slope[place] = _rounded(gradient * slope_scale, slope[place])
                    line[place] = _rounded(kept, line[place])
