from tiny_models import sizes
from transformers import (
    AutoModelForImageClassification,
    BigBirdConfig,
    BigBirdForSequenceClassification,
    ResNetConfig,
    ViTImageProcessor,
)

from samerun.export import export_model, plain_model
from samerun.models.pretrained import drop_pooler

SIZES = {"hidden_sizes": [8, 8, 8, 8], "embedding_size": 8, "depths": [1, 1, 1, 1]}


def test_a_model_without_a_tokenizer(tmp_path):
    model = AutoModelForImageClassification.from_config(ResNetConfig(**SIZES, num_labels=2))
    checked = []
    for processor in (None, ViTImageProcessor()):
        export_model(tmp_path / "best", model, model.state_dict(), checked.append, processor)
        assert (tmp_path / "best" / "preprocessor_config.json").exists() == (processor is not None)
        loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "best")
        assert loaded.config.num_labels == 2
    assert len(checked) == 2


def test_a_pooler_that_was_removed_is_not_missing(tmp_path):
    model = BigBirdForSequenceClassification(BigBirdConfig(**sizes(8, heads=1, inner=8, words=9)))
    drop_pooler(model.bert)
    export_model(tmp_path / "best", plain_model(model), model.state_dict(), lambda folder: None)
    _, loading = BigBirdForSequenceClassification.from_pretrained(tmp_path / "best", output_loading_info=True)
    assert (loading["missing_keys"], loading["unexpected_keys"]) == (set(), set())
