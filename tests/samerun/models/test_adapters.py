import re
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import sizes
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from samerun.errors import InputError
from samerun.fsdp import FsdpSettings
from samerun.models.adapters import (
    check_quantization,
    layerwise_scale,
    limit_training,
    load_plain,
    to_export,
)
from samerun.models.pretrained import load_config, load_model_and_new_names, model_content
from samerun.task_scripts import task_of

HEAD = {"classifier.weight", "classifier.bias"}
IDS = torch.arange(1, 9)[None]


def small_model():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**sizes(8, 3, 2, 12, 20), num_labels=3)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.fixture
def adapted(arguments, tmp_path):
    """Makes (a model with adapters that change what it computes, its arguments); its base is a folder."""

    def make(**given):
        model = small_model()
        model.save_pretrained(tmp_path / "base")
        asked = arguments(lora_r=2, model_name_or_path=str(tmp_path / "base"), **given)
        model = limit_training(model, asked, HEAD)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name or name in HEAD:
                    parameter.normal_()
        return model.to("cpu").eval(), asked  # which rounds weights that are to have few bits

    return make


KINDS = {
    "lora": {}, "dora": {"use_dora": True, "lora_alpha": 3.0},
    "4 bits": {"quantize": "4"}, "8 bits": {"quantize": "8"},
}  # fmt: skip


@pytest.mark.parametrize("given", KINDS.values(), ids=KINDS)
def test_merged_weights_compute_what_the_adapters_do(adapted, given):
    model, asked = adapted(**given)
    with torch.device("meta"):
        plain = BertForSequenceClassification(model.config)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved, merged = to_export(model, plain, weights, asked)
    assert saved is plain
    result = small_model()
    before = logits(result)
    result.load_state_dict(merged)  # strict: no name too many or too few
    near = 5e-2 if given.get("quantize") == "8" else 1e-5  # layers in 8 bits round their inputs as well
    torch.testing.assert_close(logits(result), logits(model), rtol=near, atol=near)
    assert not torch.allclose(logits(result), before, atol=1e-2)


@pytest.mark.parametrize("in_4bit", [False, True])
def test_an_adapters_folder_is_loaded_by_peft_and_by_us(adapted, arguments, tmp_path, in_4bit):
    model, asked = adapted(export="adapter", quantize="4" if in_4bit else None)
    saved, weights = to_export(model, small_model().to("meta"), model.state_dict(), asked)
    assert set(weights) == trained(model)
    folder = tmp_path / "best"
    folder.mkdir()
    saved.save_pretrained(folder, weights)
    assert task_of(folder) == "classify"

    expected, auto_class = logits(model), AutoModelForSequenceClassification
    base = auto_class.from_pretrained(tmp_path / "base", config=AutoConfig.from_pretrained(folder))
    by_peft = logits(PeftModel.from_pretrained(base, folder).eval())
    # peft does not know that the base model was rounded.
    assert torch.allclose(by_peft, expected, rtol=1e-5, atol=1e-5) != in_4bit
    torch.testing.assert_close(logits(load_plain(folder, auto_class).eval()), expected)

    named = arguments(model_name_or_path=str(folder))
    again, new_names = load_model_and_new_names(auto_class, named, load_config(named))
    torch.testing.assert_close(logits(again.eval()), expected)
    assert (new_names, trained(again)) == (set(), set(dict(again.named_parameters())))
    assert set(model_content(None, str(folder))) == {"adapter_model.safetensors", "model.safetensors"}


def test_a_layer_whose_inputs_get_its_weights_precision_keeps_its_own(arguments):
    model = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    model = limit_training(model, arguments(lora_r=2, quantize="4"), set()).to("cpu")
    kinds = {name.split(".")[-3]: w.dtype for name, w in model.named_parameters() if "base_layer" in name}
    assert (kinds["wi"], kinds["wo"]) == (torch.uint8, torch.float32)


def test_adapters_and_new_weights_alone_are_trained(arguments):
    some = arguments(lora_r=2, lora_target_modules=("query", "value"))
    found = trained(limit_training(small_model(), some, HEAD))
    adapters = found - HEAD
    assert (len(found), len(adapters)) == (2 + 3 * 2 * 2, 3 * 2 * 2)
    assert all(re.search(r"\.(query|value)\.lora_[AB]\.", name) for name in adapters)
    everywhere = trained(limit_training(small_model(), arguments(lora_r=2), HEAD))
    assert not any(name.startswith("classifier.lora") for name in everywhere)
    assert sum("lora_A" in name for name in everywhere) == 3 * 6 + 1  # six matrices a layer, and the pooler's


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_proj",), r"q_proj: no such layer .*; the model has bert\.embeddings"),
        (("query", "valeu"), r"query,valeu: there is no layer valeu; the model has bert\.embeddings"),
        (("all-linear", "query"), "all-linear,query: there is no layer all-linear"),
    ],
)
def test_names_that_adapt_nothing_are_refused(arguments, targets, said):
    with pytest.raises(InputError, match=f"--lora_target_modules {said}"):
        limit_training(small_model(), arguments(lora_r=2, lora_target_modules=targets), HEAD)


def test_layers_that_share_their_weights_are_not_adapted(arguments):
    sizes = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20)
    for target in ("lm_head", "shared"):
        asked = arguments(lora_r=2, lora_target_modules=(target, "q"))
        with pytest.raises(InputError, match=rf"{target} shares its weights with .*; name other layers"):
            limit_training(T5ForConditionalGeneration(sizes), asked, set())
    limit_training(T5ForConditionalGeneration(sizes), arguments(lora_r=2), set())


def test_an_adapter_of_an_adapter_or_without_its_base_model_is_explained(adapted, arguments, tmp_path):
    model, asked = adapted(export="adapter")
    saved, weights = to_export(model, small_model().to("meta"), model.state_dict(), asked)
    (tmp_path / "best").mkdir()
    saved.save_pretrained(tmp_path / "best", weights)
    named = arguments(lora_r=2, export="adapter", model_name_or_path=str(tmp_path / "best"))
    with pytest.raises(InputError, match="is an adapter, on which no other can stand"):
        limit_training(small_model(), named, HEAD)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(InputError, match=f"its base model {tmp_path / 'base'}: this folder does not exist"):
        load_model_and_new_names(AutoModelForSequenceClassification, named, load_config(named))


def test_an_adapter_of_peft_without_its_labels_is_explained(arguments, tmp_path):
    small_model().save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")  # of three labels
    get_peft_model(base, LoraConfig(task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    config = AutoConfig.from_pretrained(tmp_path / "base")
    config.num_labels = 2  # as without a config.json of its own
    named = arguments(model_name_or_path=str(tmp_path / "adapter"))
    with pytest.raises(InputError, match=r"do not fit, and it has no config\.json, which holds the labels"):
        load_model_and_new_names(AutoModelForSequenceClassification, named, config)


def test_as_many_layers_as_there_are_can_be_frozen(arguments):
    frozen = limit_training(small_model(), arguments(freeze=("3",)), HEAD)
    assert not any(".layer." in name for name in trained(frozen))
    with pytest.raises(InputError, match="--freeze 4: the model has 3 numbered layers; give a lower number"):
        limit_training(small_model(), arguments(freeze=("4",)), HEAD)


def test_an_adapter_cannot_hold_statistics_of_pretrained_batch_norms(arguments):
    model, asked = small_model(), arguments(lora_r=2, export="adapter")
    model.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(4), model.classifier)
    new = {name for name, _ in model.named_parameters() if name.startswith("classifier.")}
    with pytest.raises(InputError, match="no statistics of batch norms"):
        limit_training(model, asked, new - {"classifier.0.weight", "classifier.0.bias"})
    limit_training(model, asked, new)


def test_weights_in_few_bits_are_refused_where_they_would_be_divided(arguments):
    asked = arguments(lora_r=2, quantize="4", model_name_or_path="base")
    check_quantization(asked, SimpleNamespace(deepspeed_config=None, fsdp=None))
    for name, launch in {"DeepSpeed": ({}, None), "FSDP": (None, FsdpSettings())}.items():
        with pytest.raises(InputError, match=rf"--quantize 4 does not work with {name}, .*configs/ddp\.yaml"):
            check_quantization(asked, SimpleNamespace(deepspeed_config=launch[0], fsdp=launch[1]))


def test_frozen_weights(arguments):
    model = limit_training(small_model(), arguments(freeze=("embeddings", "2", "*.pooler.*")), HEAD)
    frozen = set(dict(model.named_parameters())) - trained(model)
    parts = {re.sub(r"^bert\.(embeddings|encoder\.layer\.\d|pooler).*", r"\1", name) for name in frozen}
    assert parts == {"embeddings", "encoder.layer.0", "encoder.layer.1", "pooler"}
    with pytest.raises(InputError, match=r"--freeze \*\.adapter: the model has no such pretrained weights"):
        limit_training(small_model(), arguments(freeze=("*.adapter",)), HEAD)
    with pytest.raises(InputError, match="nothing is left to train"):
        limit_training(small_model(), arguments(freeze=("*",)), set())
    assert trained(limit_training(small_model(), arguments(freeze=("*",)), HEAD)) >= HEAD


def test_learning_rates_fall_from_the_head_to_the_embeddings():
    scales = {name: layerwise_scale(name, 3, 0.5) for name, _ in small_model().named_parameters()}
    assert scales["classifier.weight"] == scales["bert.pooler.dense.weight"] == 1.0
    layers = [scales[f"bert.encoder.layer.{number}.output.dense.weight"] for number in range(3)]
    assert (layers, scales["bert.embeddings.word_embeddings.weight"]) == ([0.125, 0.25, 0.5], 0.0625)
    assert layerwise_scale("transformer.word_embedding.weight", 3, 0.5) == 0.0625  # XLNet
    assert layerwise_scale("deberta.encoder.rel_embeddings.weight", 3, 0.5) == 0.0625
