from transformers import AutoModelForImageClassification, ResNetConfig, ViTImageProcessor

from samerun.export import export_model

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
