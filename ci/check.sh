#!/usr/bin/env bash
# What `make check` runs: each check to its end, and a failure if any of them failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec make --no-print-directory --keep-going lint types test
