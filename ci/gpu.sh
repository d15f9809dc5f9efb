#!/usr/bin/env bash
# What a machine with GPUs proves, in one go: the tests on its torch and Python, then the catalogue on devices. Needs an
# environment in which tpbed and its needs can be imported; PYTHON says which. Each part runs to its end.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
status=0

part() { # TITLE COMMAND...
  local title=$1 began=$SECONDS code=0
  shift
  printf '\n=== %s\n' "$title"
  "$@" || code=$?
  printf '=== %s: exit status %d after %d s\n' "$title" "$code" $((SECONDS - began))
  ((status)) || status=$code
}

tpbed() { "$python" -c 'from tpbed.harness.cli import main; main()' "$@"; }

part 'doctor' tpbed doctor
part 'tests' "$python" -m pytest -q -n 8 --dist loadgroup tests
part 'catalogue over NCCL' tpbed run --world nccl
part 'catalogue over gloo' tpbed run --world gloo
exit "$status"
