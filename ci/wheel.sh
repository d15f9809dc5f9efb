#!/usr/bin/env bash
# Builds the wheel from a clean build/ and tries it away from the checkout, in an environment that has nothing else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
checkout=$PWD
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT

rm -rf build/lib build/bdist.* dist # setuptools would pack a module again that the tree has lost
.venv/bin/python -m build --wheel --outdir dist >"$away/build.log" 2>&1 || { cat "$away/build.log" && exit 1; }
wheel=$(echo "$checkout"/dist/tpbed-*.whl)
.venv/bin/python -m venv "$away/venv"
"$away/venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$wheel"

cd "$away"
venv/bin/python -I "$checkout/ci/wheel_contents.py" "$wheel" "$checkout"
venv/bin/tpbed list
venv/bin/tpbed run 'healthy/*' --world sim
