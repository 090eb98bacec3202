#!/usr/bin/env bash
# Installs the requirements and runs the test suite; --fast skips slow tests (launchers, long trainings).
# Further arguments go to pytest: bash scripts/test.sh --fast -k plan
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
environment requirements*.txt tests/requirements.txt
select=()
if [ "${1:-}" = --fast ]; then
  shift
  select=(-m "not slow")
fi
ruff check .
ruff format --check --quiet . || {
  echo "error: run ruff format ." >&2
  exit 1
}
unset PYTHONDONTWRITEBYTECODE # hundreds of processes share the compiled sources
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
# Two test processes, because tests often use one core or wait for a launcher. Tests that share runs stay in one process
# (tests/conftest.py). No restarts: after the death of a test process pytest-xdist 3.8.0 would wait for ever.
exec python -m pytest --numprocesses 2 --dist loadgroup --max-worker-restart 0 "${select[@]}" "$@"
