"""The four verbs of title generation on a model that is a table."""

import dataclasses
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import titlegen
import torch
from text_tasks import SEARCH, searching, titles
from tiny_models import build, encoder_decoder, sizes
from torch.nn.functional import log_softmax
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from samerun.data.tokens import Ragged
from samerun.errors import TrainingError
from samerun.task import Batch
from samerun.text.titles import IGNORED, teacher_forcing


class Table(torch.nn.Module):
    """The logits of the next token depend on the decoder's last token alone."""

    def __init__(self, vocabulary: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.logits = torch.nn.Parameter(torch.randn(vocabulary, vocabulary))

    def forward(self, input_ids, attention_mask, decoder_input_ids, use_cache):
        assert not use_cache
        return SimpleNamespace(logits=self.logits[decoder_input_ids])


def batch(labels, rows=None) -> Batch:
    labels = torch.tensor(labels)
    ids = torch.ones(len(labels), 3, dtype=torch.long)
    rows = torch.arange(len(labels)) if rows is None else torch.tensor(rows)
    return Batch(rows, {"input_ids": ids, "attention_mask": ids}, labels)


def test_labels_are_moved_right_behind_the_start_id():
    forced = teacher_forcing(torch.tensor([[4, 5, 3], [4, 3, IGNORED]]), SEARCH)
    assert forced["decoder_input_ids"].tolist() == [[2, 4, 5], [2, 4, 3]]
    longer = teacher_forcing(torch.tensor([[3, IGNORED, IGNORED]]), SEARCH)
    assert longer["decoder_input_ids"].tolist() == [[2, 3, 0]]


@pytest.mark.parametrize("kind", ["titles", "blocks"])
def test_a_decoder_needs_no_mask(kind):
    model, ids = build(kind).eval(), torch.randint(3, 60, (2, 500))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    labels = torch.tensor([[4, 5, 3, 7], [4, 3, IGNORED, IGNORED]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with torch.no_grad():
        ours = model(**inputs, **teacher_forcing(labels, SEARCH)).logits
        masked = model(**inputs, **teacher_forcing(labels, SEARCH), decoder_attention_mask=mask).logits
    torch.testing.assert_close(ours[labels != IGNORED], masked[labels != IGNORED])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_sum_over_title_tokens_of_real_rows(smoothing):
    model, task = Table(), titles(label_smoothing_factor=smoothing)
    rows = batch([[4, 5, 3], [4, 3, IGNORED], [1, 1, 1]], rows=[0, 1, -1])
    expected = 0.0
    for last, target in ((2, 4), (4, 5), (5, 3), (2, 4), (4, 3)):
        chances = log_softmax(model.logits[last], -1)
        expected -= (1 - smoothing) * chances[target] + smoothing * chances.mean()
    assert task.loss_sum(model, rows).item() == pytest.approx(expected.item(), rel=1e-6)
    assert task.num_targets(rows).item() == 5


def test_the_evaluation_loss_weighs_rows_by_their_tokens():
    ids = np.array([[[2, 7, 1, 8]], [[2, 9, 9, 9]]])  # 0 to 3 are special tokens
    predictions = {"loss": np.array([4.0, 3.0]), "targets": np.array([4, 1]), "ids": ids}
    split = SimpleNamespace(path="valid.csv", titles=["2 7 1 8", "d"], texts=["too much", "fine"], where=None)
    metrics = titles().score(predictions, split)
    assert metrics["loss"] == pytest.approx(7 / 5)
    assert metrics["gen_len"] == 2.5
    assert metrics["rougeL"] == pytest.approx(0.5)
    message = r"losses are not finite for 1 of 2 rows, first for row 0 \(0-based\), 'too much'"
    with pytest.raises(TrainingError, match=message):
        titles().score({**predictions, "loss": np.array([np.nan, 3.0])}, split)


def test_the_figures_have_the_lengths_of_titles_references_and_documents(monkeypatch):
    shown = []
    monkeypatch.setattr(titlegen.titles, "report_content", lambda *given: shown.extend(given[2]))
    generated = np.array([[[2, 3, 7, 1, 8, 3, 0]], [[2, 2, 3, 3, 3, 0, 0]]])  # 0 to 3 are special tokens
    targets = Ragged.of([[7, 1, 8, 3], [9, 3]])
    split = MagicMock(targets=targets, lengths=np.array([5, 6]), titles=["a", "b"], texts=["c", "d"])
    split.__len__.return_value = 2
    titles().figures({"ids": generated, "targets": np.array([4, 2])}, split)
    assert [each.tolist() for each in shown] == [[2, 0], [2, 1], [5, 6]]


@pytest.mark.parametrize("beams", [1, 3])
def test_documents_that_are_scored_are_encoded_once_and_titled_as_ever(beams):
    torch.manual_seed(0)
    model = encoder_decoder(sizes(16, words=30)).eval()
    ids = torch.randint(4, 30, (3, 7))
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 7])
    rows = Batch(
        torch.tensor([0, 1, -1]),
        {"input_ids": ids, "attention_mask": mask},
        torch.tensor([[5, 3], [6, 3], [7, 3]]),
    )
    wanted = titles(searching(num_beams=beams))
    encoded = []
    handle = model.encoder.register_forward_hook(lambda *_: encoded.append(1))
    with torch.no_grad():
        found = wanted.predict(model, rows)
        assert len(encoded) == 1
        handle.remove()
        alone = wanted.predict(model, dataclasses.replace(rows, labels=None))
    assert torch.equal(found["ids"], alone["ids"])
    assert found["ids"].shape == (3, 1, 6)
    assert found["loss"][0] > 0
    assert "loss" not in alone


def test_documents_of_a_model_with_routers_are_scored_and_titled():
    shared = {"d_model": 8, "d_ff": 8, "num_heads": 2, "d_kv": 4, "num_experts": 2}
    config = SwitchTransformersConfig(vocab_size=30, num_layers=2, num_decoder_layers=2, **shared)
    config.decoder_start_token_id, ids = 0, torch.arange(4, 10).view(2, 3)
    model = SwitchTransformersForConditionalGeneration(config).eval()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    rows = Batch(torch.tensor([0, 1]), inputs, torch.tensor([[5, 3], [6, 3]]))
    with torch.no_grad():
        assert titles(searching(num_beams=2)).predict(model, rows)["ids"].shape == (2, 1, 6)


def test_more_candidates_than_beams_are_refused():
    """They would need another search, and change the first title and the metrics."""
    for beams, candidates, problems in ((2, 3, 1), (2, 2, 0), (None, 9, 0)):
        asked = titlegen.Arguments(output_dir="a", num_beams=beams, num_return_sequences=candidates)
        assert len(titlegen.SearchArguments.problems(asked)) == problems
