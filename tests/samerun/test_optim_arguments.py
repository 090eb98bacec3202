import pytest

from samerun import optim_arguments

ZERO = {"zero_optimization": {"stage": 2}}


def test_what_works_on_whole_weights_is_refused_under_zero(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    refused = {name: optim_arguments.refusals(name, ZERO, "ds.json") for name in optim_arguments.OPTIMIZERS}
    working = ["adamw_torch_fused", "sgd", "rmsprop", "lion_32bit"]
    assert [name for name, found in refused.items() if not found] == working
    assert refused["muon"] == [
        "--optim muon does not work under ZeRO: it orthogonalises whole matrices. Launch without DeepSpeed "
        f"(accelerate_configs/ddp.yaml), or choose {', '.join(working)}"
    ]
    assert [
        name for name in optim_arguments.OPTIMIZERS if optim_arguments.OPTIMIZERS[name].unshardable is None
    ] == working
    assert not any(optim_arguments.refusals(name, None, None) for name in optim_arguments.OPTIMIZERS)


def test_a_deepspeed_file_that_names_adamw_contradicts_another_optimizer():
    named = {**ZERO, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    assert optim_arguments.refusals("adamw_torch_fused", named, "ds.json") == []
    (message,) = optim_arguments.refusals("sgd", named, "ds.json")
    assert message == "ds.json: its section 'optimizer' asks for AdamW but --optim is sgd; remove the section"


@pytest.mark.parametrize("optim", ["lion_32bit", "adamw_bnb_8bit"])
def test_what_is_not_installed_is_known_at_once(optim, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (message,) = optim_arguments.refusals(optim, None, None)
    assert message == f"--optim {optim}: bitsandbytes is not installed (pip install -r requirements-8bit.txt)"


def test_an_optimizer_in_words(arguments):
    assert (
        optim_arguments.describe(arguments()) == "adamw_torch_fused; its state: 8 bytes per trained element"
    )
    asked = arguments(optim="rmsprop", optim_args="eps=1e-8, centered=true ,momentum=0.9")
    assert (
        optim_arguments.describe(asked)
        == "rmsprop momentum=0.9 centered=True; its state: 12 bytes per trained element"
    )
    assert optim_arguments.describe(arguments(optim="sgd")) == "sgd; its state: 0 bytes per trained element"
    assert optim_arguments.describe(arguments(optim="muon")).endswith(
        "4 bytes per element of hidden matrices, 8 per other"
    )


def test_under_fsdp_only_optimizers_whose_state_has_the_shape_of_the_weight_work():
    refused = {
        name
        for name in optim_arguments.OPTIMIZERS
        if any("FSDP" in line for line in optim_arguments.refusals(name, None, None, True))
    }
    assert refused == optim_arguments.OPTIMIZERS.keys() - {"adamw_torch_fused", "sgd", "rmsprop"}
