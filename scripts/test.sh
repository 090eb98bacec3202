#!/usr/bin/env bash
# Installs what is needed and runs the whole test suite; --fast leaves out what starts launchers or trains for long.
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
unset PYTHONDONTWRITEBYTECODE # or hundreds of processes would compile the same sources, each for itself
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
# Two at a time: half of a test's time is one core's, or a wait for a launcher. What shares runs stays together (tests/conftest.py).
# A process of the tests that dies is a failure, and not replaced: what is left then would wait for ever (pytest-xdist 3.8.0).
exec python -m pytest --numprocesses 2 --dist loadgroup --max-worker-restart 0 "${select[@]}" "$@"
