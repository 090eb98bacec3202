import os
import subprocess
import sys

import pytest

APP = os.path.join(os.path.dirname(__file__), "..", "..", "app")
SHOW = """
import os, resource, sys
from samerun.cli import set_up_host
set_up_host()
blocks = bytearray(200_000_000)
del blocks
with open("/proc/self/statm") as pages:
    resident = int(pages.read().split()[1]) * resource.getpagesize()
print(os.environ.get("GOMP_SPINCOUNT"), resident > 200_000_000)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc and OpenMP of Linux")
@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, "2000 True"),  # threads wait asleep soon; freed memory stays
        ({"GOMP_SPINCOUNT": "7", "MALLOC_TRIM_THRESHOLD_": "100000"}, "7 False"),
        ({"OMP_WAIT_POLICY": "active"}, "None True"),
    ],
)
def test_only_what_the_user_did_not_set_is_set(given, shown):
    environment = {**os.environ, "PYTHONPATH": APP}
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "GLIBC_TUNABLES"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment | given, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == shown
