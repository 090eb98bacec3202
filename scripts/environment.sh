# Sourced by the other scripts. Creates and activates .venv in the repository (PYTHON=... chooses the interpreter) and installs
# the requirement files that have changed since the last call.
# shellcheck shell=bash
environment() {
  local python=${PYTHON:-python3} stamp=.venv/installed wanted
  if [ ! -x .venv/bin/python ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "error: $python is older than Python 3.11; name a newer one: PYTHON=python3.12 $0" >&2
      exit 2
    }
    "$python" -m venv .venv || {
      echo "error: $python cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv)" >&2
      exit 2
    }
  fi
  # shellcheck disable=SC1091
  source .venv/bin/activate
  wanted=$(cat "$@" | sha256sum)
  if ! grep -qsF "$wanted" "$stamp"; then
    echo "installing $* into .venv (once, a few minutes)"
    # torch first, because the build of DeepSpeed imports it
    pip install --quiet --disable-pip-version-check "$(grep '^torch==' requirements.txt)"
    for file in "$@"; do pip install --quiet --disable-pip-version-check -r "$file"; done
    pip install --quiet --disable-pip-version-check --no-deps -e . # the command `samerun`
    echo "$wanted" >>"$stamp"
  fi
}
