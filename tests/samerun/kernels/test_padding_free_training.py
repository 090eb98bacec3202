"""Steps of the engine without padding: the same as with padding, however they are cut, and the same again."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from linear_task import make_plan
from test_encoders import LENGTHS, classifier
from text_tasks import classification
from tiny_models import collator

from samerun.data.batches import TrainBatches
from samerun.evaluate import predict
from samerun.kernels.padding_free import use_padding_free
from samerun.optimizer import build_optimizer
from samerun.task import Split
from samerun.training import seed_step, train_step

TASK = classification(3)
DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
ROWS = np.array([*LENGTHS, 3, 18, 30, 2])
collate = collator(ROWS)


@pytest.fixture
def trained(start_run, arguments):
    """Trains from step `first` on for some steps; gives the model and the optimizer as they are before and
    after each."""

    def train(padding_free, max_tokens, steps=4, first=0, state=None, **dropout):
        plan = make_plan(len(ROWS), epochs=3, global_batch_size=6)
        plan = replace(plan, batch=replace(plan.batch, max_tokens=max_tokens, accumulation=1))
        run, model = start_run(plan.batch), classifier(**dropout)
        if state:
            model.load_state_dict(state[0])
        if padding_free:
            use_padding_free(model)
        optimizer = build_optimizer(arguments(adam_epsilon=1e-5), model, 1e-3, lambda *_: 1.0)
        model, optimizer = run.accelerator.prepare(model, optimizer)
        if state:
            optimizer.load_state_dict(state[1])
        split, found = Split("rows", collate, len(ROWS), lengths=ROWS), []
        batches = TrainBatches(split, plan, 0, 1, True, padding_free, dropout_by_row=True)
        for step in range(first, steps):
            found.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
            seed_step(7, step, 0, True)
            train_step(run, model, optimizer, TASK, batches[step], 0.5)
        return run, model, found

    return train


def test_weights_after_some_steps_are_those_of_padded_passes(trained):
    _, expected, _ = trained(False, 1000, **DROPOUT)
    for padding_free, max_tokens in ((True, 1000), (True, 50), (False, 50)):
        _, model, _ = trained(padding_free, max_tokens, **DROPOUT)
        for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
            if not name.endswith("key.bias"):  # softmax does not depend on it
                # An element moves by up to 4e-3.
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5, msg=name)


def test_with_dropout_a_run_goes_on_to_the_bit(trained):
    _, whole, states = trained(True, 50, **DROPOUT)
    _, resumed, _ = trained(True, 50, first=2, state=states[2], **DROPOUT)
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_evaluation_gives_the_same_logits(trained):
    class Rows:
        def batches(self, *_):
            return [collate(np.arange(4)), collate(np.arange(4, 10))]

        def __len__(self):
            return len(ROWS)

    (run, model, _), (_, other, _) = trained(True, 1000, steps=0), trained(False, 1000, steps=0)
    found, expected = (predict(run, m, TASK, Rows())[0] for m in (model, other))
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-5)
