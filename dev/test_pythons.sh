#!/usr/bin/env bash
# Run one make target on every Python that Tinkex supports and this machine has, each in a virtual
# environment of its own; say what came of each, and name those that are not here. Exits 1 when one
# failed. Usage: dev/test_pythons.sh TARGET [--without VERSION]
set -uo pipefail
cd "$(dirname "$0")/.."
target="$1"
without="${3:-}"
report=()
status=0
for version in 3.11 3.12 3.13 3.14; do
    [ "$version" = "$without" ] && continue
    if ! python="$(sh dev/find_python.sh "$version" 2>/dev/null)"; then
        report+=("Python $version: not found here (PATH, pyenv, uv), so not tested")
    elif make --no-print-directory "$target" PYTHON="$python"; then
        report+=("Python $version: make $target passed ($python)")
    else
        report+=("Python $version: make $target FAILED ($python)")
        status=1
    fi
done
printf '%s\n' "${report[@]}"
exit "$status"
