import json
from pathlib import Path

import comm_bench
import launchers
import pytest
from launchers import as_words

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "comm_bench.py"


def test_bus_bandwidth_is_that_of_nccl_tests():
    # A ring's all-reduce moves 2 (n - 1) / n of the message over every link; a broadcast moves it once.
    assert comm_bench.bus_bandwidth("all_reduce", 1000, 2.0, 2) == 500
    assert comm_bench.bus_bandwidth("all_reduce", 1000, 2.0, 8) == 875
    assert comm_bench.bus_bandwidth("broadcast", 1000, 2.0, 8) == 500


@pytest.fixture
def home(tmp_path):
    launchers.write_corpus(tmp_path)
    return tmp_path


def test_one_process_has_nobody_to_talk_to(home):
    finished = launchers.run([*launchers.python(), str(SCRIPT)], home, real=True)
    assert finished.code == 2
    assert finished.err.strip() == (
        "error: found one process, expected two or more; launch with torchrun --nproc_per_node 2, for example"
    )


@pytest.mark.slow
def test_two_processes_measure_and_judge_a_model(home):
    from transformers import AutoConfig, AutoModel

    command = [
        *launchers.torchrun(2),
        str(SCRIPT),
        *as_words(max_size_mb="1", repeats="3", output="found.json"),
    ]
    finished = launchers.run([*command, "--config_name", "bert/config.json"], home).check()
    found = json.loads((home / "found.json").read_text())

    model = AutoModel.from_config(AutoConfig.from_pretrained(home / "bert"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (found["processes"], found["machines"], found["backend"]) == (2, 1, "gloo")
    assert [row["bytes"] for row in found["sizes"]] == [1024, 4096, 16384, 65536, 262144, 2**20]
    for row in found["sizes"]:
        for name in ("all_reduce", "broadcast"):  # with two processes both factors are 1
            assert row[f"{name}_bus_bytes_per_second"] == pytest.approx(row["bytes"] / row[f"{name}_seconds"])
    assert (found["parameters"], found["gradient_bytes"], found["zero_stage"]) == (
        parameters,
        4 * parameters,
        0,
    )
    assert 0 < found["step_communication_seconds"] < 60
    lines = finished.out.splitlines()
    assert lines[0] == "communication  2 processes on 1 machine(s), gloo on cpu"
    assert len([line for line in lines if line.count("GB/s") == 2]) == 6
    milliseconds = f"{1000 * found['step_communication_seconds']:.1f}"
    assert lines[-1] == f"DDP            communication should take about {milliseconds} ms of a step"
