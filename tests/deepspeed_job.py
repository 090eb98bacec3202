"""Saves the state of DeepSpeed engines on two processes and restores it in new engines; started by a
launcher.

For every ZeRO stage, fp32 and bf16, and several optimizers: trains three steps, saves the state, and trains
two more steps. A new engine with the restored state must have the same weights, and the
same bytes after the same two steps. The model has difficult cases: a buffer, tied weights, a large and a
small frozen weight, and odd sizes.
"""

import os
import sys
from functools import partial
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app"))

import deepspeed
import torch
from torch import nn

from samerun import deepspeed as our_deepspeed
from samerun.plan import derive_batch

NOT_PARTITIONED = 10**9  # ZeRO-3 partitions only larger weights
CELLS = [
    *((stage, whole, p, "adamw") for stage,
      whole in ((1, 0), (2, 0), (3, 0), (3, NOT_PARTITIONED)) for p in ("no", "bf16")),
    (1, 0, "bf16", "sgd"), (2, 0, "no", "sgd"), (2, 0, "no", "plain sgd"), (2, 0, "bf16", "rmsprop"),
    (3, 0, "no", "rmsprop"),
]  # fmt: skip
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True, fused=True),
    "plain sgd": partial(torch.optim.SGD, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 7)
        self.places = nn.Embedding(40, 7)
        self.places.weight.requires_grad = False
        # An even size, because the padding of a frozen weight is undefined.
        self.scale = nn.Parameter(torch.rand(2, 7), requires_grad=False)
        self.register_buffer("seen", torch.zeros(7))
        self.middle = nn.Linear(7, 7)
        self.head = nn.Linear(7, 30, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = (self.words(tokens) + self.places(tokens)) * self.scale.mean(0)
        self.seen += hidden.detach().mean(0)
        return self.head(torch.tanh(self.middle(hidden - (self.seen / 100).to(hidden.dtype))))


def begin(
    seed: int, cell: tuple[int, int, str, str], weights: dict[str, torch.Tensor] | None = None
) -> deepspeed.DeepSpeedEngine:
    stage, whole, precision, optimizer = cell
    torch.manual_seed(seed)
    model = Model()
    if weights is not None:
        model.load_state_dict(weights)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0}]
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": whole}}
    full = our_deepspeed.complete_config(config, "ds.json", derive_batch(2, 8), 1.0, precision)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=OPTIMIZERS[optimizer](groups, lr=1e-2), config=full
    )
    return engine


def step(engine: deepspeed.DeepSpeedEngine, number: int, rate: float = 1e-2) -> None:
    torch.manual_seed(100 * number + torch.distributed.get_rank())
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    tokens = torch.randint(30, (4,))
    loss = nn.functional.cross_entropy(engine(tokens).float(), tokens.roll(1))
    engine.backward(loss * (rate > 0))
    engine.step()


def module_state(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """The module's weights and buffers in its precision."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def full_state(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Weights and moments in fp32."""
    moments = our_deepspeed.full_moments(engine, True)
    flat = {f"{key}/{name}": t for key, tensors in moments.items() for name, t in tensors.items()}
    return {**our_deepspeed.full_parameters(engine, True), **flat}


def check(cell: tuple[int, int, str, str]) -> None:
    updates = 3
    engine = begin(0, cell)
    for number in range(updates):
        step(engine, number)
    module, saved = module_state(engine), full_state(engine)
    weights, moments = our_deepspeed.full_parameters(engine, True), our_deepspeed.full_moments(engine, True)
    cast = {name: tensor.to(module[name].dtype) for name, tensor in weights.items()}
    assert_equal(cast, {name: module[name] for name in weights})
    for number in (7, 8):
        step(engine, number)
    end = full_state(engine)
    engine.destroy()

    # Weights before the engine is made, moments and master weights after it.
    other = begin(1, cell, {**module, **weights})
    step(other, 0, rate=0.0)
    our_deepspeed.restore_moments(other, moments, updates)
    our_deepspeed.restore_weights(other, weights)
    for name, buffer in other.module.named_buffers():
        buffer.copy_(module[name])  # they differ between processes, and the first step has changed them
    assert_equal(full_state(other), saved)
    assert_equal(module_state(other), module)
    for number in (7, 8):
        step(other, number)
    assert_equal(full_state(other), end)
    other.destroy()
    if torch.distributed.get_rank() == 0:
        print("restored", *cell, flush=True)


if __name__ == "__main__":
    our_deepspeed.skip_shared_memory_operator()
    deepspeed.init_distributed("gloo")
    for cell in CELLS:
        check(cell)
    # As in `signals.finish`: threads of gloo may abort the process while the interpreter shuts down.
    torch.distributed.barrier()
    os._exit(0)
