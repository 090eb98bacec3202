"""CUDA graphs: the passes of a micro-batch, forward and backward, recorded and replayed in one launch.

A pass has a thousand kernels or more. For small models or short texts the host takes longer to launch them
than the GPU to compute them (benchmarks/gpu.md). The first micro-batch of a shape is computed as ever, the
second one is recorded, and from then on the pass is replayed: the same kernels in the same order, with
dropout from the same place of the same generator. benchmarks/gpu.md says what was seen to be equal.
"""

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from samerun.errors import in_short
from samerun.task import Batch

MOST_SHAPES = 64  # each graph takes some MiB on the GPU
HOST_GENERATORS: Any = (  # how to read and set their states
    (lambda: torch.get_rng_state().numpy(), lambda state: torch.set_rng_state(torch.from_numpy(state))),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


class Recorded(NamedTuple):
    """A graph, with the tensors that it reads and writes."""

    graph: Any  # torch.cuda.CUDAGraph, which a build of torch for CPUs has not
    batch: Batch
    loss: Tensor


class Passes:
    """Calls `work(batch, scale)`, which adds a micro-batch's gradient and returns its loss, or replays it.

    A graph adds to the gradients' tensors of the time when it was recorded, so they must be zeroed, not
    dropped, after each step. What the host reads, other than the shapes of a batch, must not change from
    pass to pass; if the host waits for the GPU or draws random numbers, nothing is recorded. `say` prints a
    line.
    """

    def __init__(
        self, work: Callable[[Batch, Tensor], Tensor], model: nn.Module, say: Callable[[str], None]
    ) -> None:
        self.work, self.say, self.active = work, say, True
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.seen: set[tuple] = set()  # shapes
        self.recorded: dict[tuple, Recorded] = {}  # by shape
        self.places: list[tuple] = []
        self.scale: Tensor
        self.stream: Any  # on which passes are recorded

    def __call__(self, batch: Batch, scale: Tensor) -> Tensor:
        shape = shape_of(batch)
        if self.active and shape in self.seen and shape not in self.recorded:
            self._record(shape, batch, scale)
        if self.recorded and self.places != self._places():
            self._end("a weight's or gradient's tensor was exchanged")
        known = self.recorded.get(shape)
        if known is None:
            if len(self.seen) < MOST_SHAPES:
                self.seen.add(shape)
            return self.work(batch, scale)
        for mine, given in zip(tensors_of(known.batch), tensors_of(batch), strict=True):
            mine.copy_(given)
        self.scale.copy_(scale)
        with record_function("replay"):
            known.graph.replay()
        return known.loss

    def make_room(self) -> None:
        """Frees the graphs, which are recorded again, if less than half of the GPU's memory is free."""
        free, total = torch.cuda.mem_get_info()
        if free < total / 2:
            self.recorded.clear()

    def _record(self, shape: tuple, batch: Batch, scale: Tensor) -> None:
        """Records the pass without doing it. If that fails, no other is recorded or replayed."""
        if not self.recorded:
            torch.cuda.empty_cache()  # the graphs' pool is another one
            self.stream, self.scale, self.places = torch.cuda.Stream(), scale.clone(), self._places()
        pool = [known.graph.pool() for known in self.recorded.values()][:1]  # one for all
        # Without padding the lengths are part of the shape. Otherwise a model must not use them.
        mine = replace(batch.map(torch.clone), lengths=batch.lengths if is_full(batch) else None)
        graph, random_state = torch.cuda.CUDAGraph(), host_random_state()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        gpu_random_state, places = generator.get_state(), self._places()
        torch.cuda.synchronize()
        try:
            # Not `torch.cuda.graph`: it empties torch's cache for each graph, which takes long, and after an
            # error leaves its stream in use.
            with torch.cuda.stream(self.stream):
                graph.capture_begin(*pool, capture_error_mode="thread_local")  # other threads may pin memory
                try:
                    loss = self.work(mine, self.scale)
                finally:
                    graph.capture_end()
            if pickle.dumps(random_state) != pickle.dumps(host_random_state()):
                raise RuntimeError("the model draws random numbers on the host")
            if places != self._places():
                raise RuntimeError("a weight has its first gradient in a later pass")
            self.recorded[shape] = Recorded(graph, mine, loss)
        except Exception as error:
            self._end(in_short(error))
            # It would stay in the state of a recording, to which earlier graphs are tied.
            generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
            generator.set_state(gpu_random_state)
            for (_, put), state in zip(HOST_GENERATORS, random_state, strict=True):
                put(state)
            for p, (_, gradient) in zip(self.trained, places, strict=True):
                p.grad = None if gradient is None else p.grad  # the recording has made it, but not computed

    def _end(self, reason: str) -> None:
        """Nothing is recorded or replayed any more."""
        self.active = False
        self.recorded.clear()
        self.say(f"note           no CUDA graphs: {reason}")

    def _places(self) -> list[tuple]:
        """Where weights and gradients are."""
        return [(p.data_ptr(), None if p.grad is None else p.grad.data_ptr()) for p in self.trained]


def tensors_of(batch: Batch) -> list[Tensor]:
    return [x for x in (batch.rows, *batch.inputs.values(), batch.labels) if x is not None]


def is_full(batch: Batch) -> bool:
    """Whether the batch is known to have no padding."""
    return batch.lengths is not None and set(batch.lengths) == {batch.shape[-1]}


def shape_of(batch: Batch) -> tuple:
    """What two batches have in common if the same kernels compute them."""
    return is_full(batch), *((x.shape, x.dtype) for x in tensors_of(batch))


def host_random_state() -> list:
    return [get() for get, _ in HOST_GENERATORS]
